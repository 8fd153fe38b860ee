use std::time::Duration;

use drainpipe_libvirt::{
    CapabilitiesOf, Connection, Domain, DomainEvent, DomainState, Error, JobKind, JobStatsOf, Lifecycle,
    MetadataOf, UndefineFlags, Version, XmlFlags, snapshot_flags,
};
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use crate::daemons::{DEADLINE, Daemons, URI, count_qemus, small_domain};

/// The events of a domain in the first test.
const CHANGES: [Lifecycle; 7] = [
    Lifecycle::Defined,
    Lifecycle::Started,
    Lifecycle::Suspended,
    Lifecycle::Resumed,
    Lifecycle::Suspended,
    Lifecycle::Stopped,
    Lifecycle::Undefined,
];

#[tokio::test]
async fn a_domain_is_defined_runs_and_ends() {
    let Some(daemons) = Daemons::start(&["alone"]) else { return };
    let libvirt = daemons.connect("alone").await;
    check_host(&libvirt).await;

    let mut events = libvirt.events();
    libvirt.subscribe(DEADLINE).await.unwrap();
    libvirt.subscribe(DEADLINE).await.unwrap();
    let defined = libvirt.define(&small_domain("life"), DEADLINE).await.unwrap();
    assert_eq!(defined.id, None);
    check_definition(&libvirt, &defined).await;
    let domain = libvirt.start(&defined, true, DEADLINE).await.unwrap();
    assert_eq!(libvirt.state(&domain, DEADLINE).await.unwrap().state, DomainState::Paused);
    libvirt.resume(&domain, DEADLINE).await.unwrap();
    assert_eq!(libvirt.state(&domain, DEADLINE).await.unwrap().state, DomainState::Running);
    check_lists(&libvirt, &domain).await;
    libvirt.suspend(&domain, DEADLINE).await.unwrap();
    libvirt.destroy(&domain, false, DEADLINE).await.unwrap();
    assert_eq!(count_qemus(&domain), 0);
    check_snapshots(&libvirt, &domain).await;
    let flags = UndefineFlags { snapshots_metadata: true, ..UndefineFlags::default() };
    libvirt.undefine(&domain, flags, DEADLINE).await.unwrap();
    let gone = libvirt.domain_by_name("life", DEADLINE).await.unwrap_err();
    assert!(gone.is_no_domain(), "{gone}");

    for change in CHANGES {
        assert_eq!(next_change(&mut events).await, change);
    }
    libvirt.close(DEADLINE).await;
    assert!(libvirt.is_closed());
    assert!(matches!(libvirt.hostname(DEADLINE).await, Err(Error::Closed(_))));
}

async fn check_host(libvirt: &Connection) {
    let least = |major| Version { major, minor: 0, micro: 0 };
    assert!(libvirt.library_version(DEADLINE).await.expect("an answer") >= least(9));
    assert!(libvirt.hypervisor_version(DEADLINE).await.expect("an answer") >= least(7));
    assert_eq!(libvirt.hostname(DEADLINE).await.expect("an answer"), "alone");
    assert!(libvirt.capabilities_xml(DEADLINE).await.expect("an answer").contains("<capabilities>"));
    let of = CapabilitiesOf { kind: Some("qemu"), ..CapabilitiesOf::default() };
    let capabilities = libvirt.domain_capabilities_xml(of, DEADLINE).await.expect("an answer");
    assert!(capabilities.contains("<domainCapabilities>"));
}

async fn check_definition(libvirt: &Connection, domain: &Domain) {
    let xml = libvirt
        .xml(domain, XmlFlags { inactive: true, ..XmlFlags::default() }, DEADLINE)
        .await
        .expect("an answer");
    assert!(xml.contains("<name>life</name>"));
    assert!(libvirt.is_persistent(domain, DEADLINE).await.expect("an answer"));
    assert!(!libvirt.has_managed_save(domain, DEADLINE).await.expect("an answer"));
    assert_eq!(libvirt.snapshot_count(domain, DEADLINE).await.expect("an answer"), 0);
    assert_eq!(libvirt.snapshots(domain, DEADLINE).await.expect("an answer"), []);
    assert_eq!(libvirt.checkpoints(domain, DEADLINE).await.expect("an answer"), []);
    libvirt.set_autostart(domain, true, DEADLINE).await.expect("an answer");
    assert!(libvirt.autostart(domain, DEADLINE).await.expect("an answer"));
    let of = MetadataOf::Element { uri: "https://example.org/1", prefix: "own" };
    assert_eq!(libvirt.metadata(domain, of, DEADLINE).await.expect("an answer"), None);
    libvirt.set_metadata(domain, of, Some("<mark>é</mark>"), false, DEADLINE).await.expect("an answer");
    assert!(libvirt.metadata(domain, of, DEADLINE).await.expect("an answer").expect("one").contains('é'));
}

/// Afterwards, the domain cannot simply be undefined.
async fn check_snapshots(libvirt: &Connection, domain: &Domain) {
    let inactive = XmlFlags { inactive: true, ..XmlFlags::default() };
    let domain_xml = libvirt.xml(domain, inactive, DEADLINE).await.expect("an answer");
    let xml = format!(
        "<domainsnapshot><name>before</name><state>shutoff</state><creationTime>1</creationTime>{domain_xml}\
         </domainsnapshot>"
    );
    let snapshot =
        libvirt.create_snapshot(domain, &xml, snapshot_flags::REDEFINE, DEADLINE).await.expect("an answer");
    assert_eq!(snapshot.name, "before");
    assert_eq!(libvirt.snapshot_count(domain, DEADLINE).await.expect("an answer"), 1);
    assert_eq!(
        libvirt.snapshots(domain, DEADLINE).await.expect("an answer"),
        std::slice::from_ref(&snapshot)
    );
    let xml = libvirt.snapshot_xml(&snapshot, DEADLINE).await.expect("an answer");
    assert!(xml.contains("<name>before</name>"), "{xml}");
    assert_eq!(libvirt.current_snapshot(domain, DEADLINE).await.expect("an answer"), None);
    libvirt.forget_snapshot(&snapshot, DEADLINE).await.expect("an answer");
    assert_eq!(libvirt.snapshot_count(domain, DEADLINE).await.expect("an answer"), 0);
    let flags = snapshot_flags::REDEFINE | snapshot_flags::CURRENT;
    let again = libvirt.create_snapshot(domain, &xml, flags, DEADLINE).await.expect("an answer");
    assert_eq!(libvirt.current_snapshot(domain, DEADLINE).await.expect("an answer"), Some(again));
    let refused = libvirt.undefine(domain, UndefineFlags::default(), DEADLINE).await.expect_err("refused");
    assert!(refused.is_operation_invalid(), "{refused}");
}

async fn check_lists(libvirt: &Connection, domain: &Domain) {
    assert_eq!(libvirt.domains(true, DEADLINE).await.expect("an answer"), std::slice::from_ref(domain));
    assert_eq!(libvirt.domain_by_uuid(domain.uuid, DEADLINE).await.expect("an answer"), *domain);
    assert_eq!(count_qemus(domain), 1);
    let info = libvirt.info(domain, DEADLINE).await.expect("an answer");
    assert_eq!((info.state, info.vcpus, info.memory_max_kib), (DomainState::Running, 1, 64 << 10));
    let stats = libvirt.job_stats(domain, JobStatsOf::UnderWay, DEADLINE).await.expect("an answer");
    assert_eq!(stats.kind, JobKind::None);
    let refused = libvirt.start(domain, false, DEADLINE).await.expect_err("refused");
    assert!(refused.is_operation_invalid(), "{refused}");
}

async fn next_change(events: &mut Receiver<DomainEvent>) -> Lifecycle {
    loop {
        let event = timeout(DEADLINE, events.recv()).await.expect("in time").expect("the connection is open");
        match event {
            // QEMU may or may not live long enough to say so.
            DomainEvent::Lifecycle { change: Lifecycle::ShutDown, .. } => {}
            DomainEvent::Lifecycle { change, .. } => return change,
            _ => {}
        }
    }
}

#[tokio::test]
async fn many_ask_at_once_and_some_give_up() {
    let Some(daemons) = Daemons::start(&["busy"]) else { return };
    let libvirt = daemons.connect("busy").await;
    let asking: Vec<_> = (0..100_u64)
        .map(|number| {
            let libvirt = libvirt.clone();
            let deadline = if number % 3 == 0 { Duration::from_micros(number) } else { DEADLINE };
            tokio::spawn(async move { libvirt.hostname(deadline).await })
        })
        .collect();
    for (number, asked) in asking.into_iter().enumerate() {
        match asked.await.unwrap() {
            Ok(hostname) => assert_eq!(hostname, "busy"),
            Err(error) => assert!(matches!(error, Error::TimedOut { .. }) && number % 3 == 0, "{error}"),
        }
    }
    libvirt.hostname(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn the_end_of_a_daemon_is_noticed() {
    let Some(daemons) = Daemons::start(&["mortal"]) else { return };
    let libvirt = daemons.connect("mortal").await;
    let socket = daemons.socket("mortal");
    drop(daemons);
    timeout(DEADLINE, libvirt.closed()).await.expect("in time");
    let error = Connection::open(&socket, URI, DEADLINE).await.unwrap_err();
    assert!(matches!(error, Error::CannotConnect { .. }), "{error}");
}
