use std::time::{Duration, Instant};

use drainpipe_libvirt::{
    Connection, Domain, DomainEvent, DomainState, Error, JobKind, JobStatsOf, Lifecycle, Parameter,
    UndefineFlags, migrate_flags, migrate_parameters,
};
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use crate::daemons::{DEADLINE, Daemons, count_qemus, small_domain};

/// Uses QEMU's main connection alone.
const SINGLE: u32 = migrate_flags::LIVE
    | migrate_flags::PERSIST_DEST
    | migrate_flags::UNDEFINE_SOURCE
    | migrate_flags::CHANGE_PROTECTION;

const FLAGS: u32 = SINGLE | migrate_flags::PARALLEL;

/// A domain that runs at the source, and the connections that hold its migration.
struct Moving {
    daemons: Daemons,
    source: Connection,
    target: Connection,
    domain: Domain,
}

impl Moving {
    async fn start() -> Option<Self> {
        let daemons = Daemons::start(&["source", "target"])?;
        let (source, target) = (daemons.connect("source").await, daemons.connect("target").await);
        let defined = source.define(&small_domain("moving"), DEADLINE).await.expect("an answer");
        let domain = source.start(&defined, false, DEADLINE).await.expect("an answer");
        Some(Self { daemons, source, target, domain })
    }

    /// Begin, Prepare and Perform; Finish needs the result.
    async fn perform(&self, flags: u32) -> Result<Vec<u8>, Error> {
        let parameters = parameters(flags);
        let begun = self.source.migrate_begin(&self.domain, &parameters, flags, DEADLINE).await?;
        let with_xml =
            [&parameters[..], &[Parameter::text(migrate_parameters::DESTINATION_XML, begun.xml)]].concat();
        let prepared = self.target.migrate_prepare(&with_xml, &begun.cookie, flags, DEADLINE).await?;
        self.source.migrate_perform(&self.domain, &parameters, &prepared.cookie, flags, DEADLINE).await
    }

    fn finish_parameters(&self) -> Vec<Parameter> {
        let name = Parameter::text(migrate_parameters::DESTINATION_NAME, &self.domain.name);
        [parameters(FLAGS), vec![name]].concat()
    }
}

fn parameters(flags: u32) -> Vec<Parameter> {
    let to = Parameter::text(migrate_parameters::URI, "tcp:127.0.0.1:49152");
    let connections = Parameter::int(migrate_parameters::PARALLEL_CONNECTIONS, 4);
    [to].into_iter().chain((flags & migrate_flags::PARALLEL != 0).then_some(connections)).collect()
}

async fn state(libvirt: &Connection, domain: &Domain) -> DomainState {
    libvirt.state(domain, DEADLINE).await.expect("an answer").state
}

/// Whether the migration suspended the domain. Another event before it reports that memory was gone through.
fn has_been_suspended_by_migration(events: &mut Receiver<DomainEvent>) -> bool {
    let said: Vec<DomainEvent> = std::iter::from_fn(|| events.try_recv().ok()).collect();
    let iterates =
        |event: &DomainEvent| matches!(event, DomainEvent::MigrationIteration { iteration: 1, .. });
    // VIR_DOMAIN_EVENT_SUSPENDED_MIGRATED
    let suspends = |event: &DomainEvent| {
        matches!(event, DomainEvent::Lifecycle { change: Lifecycle::Suspended, detail: 1, .. })
    };
    let began = said.iter().position(iterates);
    began.is_some() && began < said.iter().position(suspends)
}

async fn wait_for_no_job(libvirt: &Connection, domain: &Domain) {
    let under_way = || libvirt.job_stats(domain, JobStatsOf::UnderWay, DEADLINE);
    while under_way().await.expect("an answer").kind != JobKind::None {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_domain_moves_and_one_copy_is_left() {
    let Some(moving) = Moving::start().await else { return };
    let Moving { daemons, source, target, domain } = &moving;
    let watching = daemons.connect("source").await;
    let mut events = watching.events();
    watching.subscribe(DEADLINE).await.unwrap();

    let cookie = moving.perform(FLAGS).await.unwrap();
    let performed = Instant::now();
    assert_eq!(state(&watching, domain).await, DomainState::Paused);
    let flags = FLAGS | migrate_flags::PAUSED;
    let finished =
        target.migrate_finish(&moving.finish_parameters(), &cookie, flags, false, DEADLINE).await.unwrap();
    let arrived = finished.domain.expect("it has arrived");
    assert_eq!(state(target, &arrived).await, DomainState::Paused);
    let stats = target.job_stats(&arrived, JobStatsOf::CompletedKept, DEADLINE).await.unwrap();
    assert_eq!((stats.kind, stats.operation), (JobKind::Completed, Some(4)));
    assert!(stats.downtime_ms.is_some() && stats.memory.remaining_bytes == Some(0), "{stats:?}");

    source.close(DEADLINE).await;
    timeout(DEADLINE, wait_for_no_job(&watching, domain)).await.unwrap();
    assert_eq!(state(&watching, domain).await, DomainState::Paused);
    target.resume(&arrived, DEADLINE).await.unwrap();
    eprintln!("from Perform's return to the resume: {} ms", performed.elapsed().as_millis());
    watching.destroy(domain, false, DEADLINE).await.unwrap();
    watching.undefine(domain, UndefineFlags::default(), DEADLINE).await.unwrap();

    let gone = watching.domain_by_uuid(domain.uuid, DEADLINE).await.unwrap_err();
    assert!(gone.is_no_domain(), "{gone}");
    assert_eq!(state(target, &arrived).await, DomainState::Running);
    assert!(target.is_persistent(&arrived, DEADLINE).await.unwrap());
    assert_eq!(count_qemus(domain), 1);
    assert!(has_been_suspended_by_migration(&mut events), "it is said");
}

#[tokio::test]
async fn a_move_that_is_cancelled_leaves_the_domain_where_it_was() {
    let Some(moving) = Moving::start().await else { return };
    let Moving { source, target, domain, .. } = &moving;
    let cookie = moving.perform(FLAGS).await.unwrap();
    let finished =
        target.migrate_finish(&moving.finish_parameters(), &cookie, FLAGS, true, DEADLINE).await.unwrap();
    assert_eq!(finished.domain, None);
    source
        .migrate_confirm(domain, &parameters(FLAGS), &finished.cookie, FLAGS, true, DEADLINE)
        .await
        .unwrap();
    assert_eq!(state(source, domain).await, DomainState::Running);
    assert_eq!(target.domains(false, DEADLINE).await.unwrap(), []);
    assert_eq!(count_qemus(domain), 1);
}

/// Without multifd: with it, QEMU 7.2 may report a cancelled migration as failed ("Unable to write to socket: Bad file
/// descriptor"), as seen once in 30 runs on busy cores.
#[tokio::test]
async fn a_move_under_way_is_watched_and_aborted() {
    let Some(moving) = Moving::start().await else { return };
    let Moving { daemons, source, domain, .. } = &moving;
    source.migrate_set_max_downtime(domain, 100, DEADLINE).await.unwrap_or_else(|error| panic!("{error}"));
    source.migrate_set_max_speed(domain, 1, DEADLINE).await.unwrap();
    let watching = daemons.connect("source").await;
    let watch = async {
        loop {
            let stats = watching.job_stats(domain, JobStatsOf::UnderWay, DEADLINE).await.unwrap();
            if stats.memory.processed_bytes > Some(0) {
                assert_eq!((stats.kind, stats.operation), (JobKind::Unbounded, Some(5)));
                assert!(stats.memory.total_bytes >= Some(64 << 20), "{stats:?}");
                return watching.abort_job(domain, DEADLINE).await.unwrap();
            }
        }
    };
    let (performed, ()) =
        timeout(DEADLINE, async { tokio::join!(moving.perform(SINGLE), watch) }).await.unwrap();
    let aborted = performed.unwrap_err();
    assert!(aborted.is_operation_aborted(), "{aborted}");
    assert_eq!(state(&watching, domain).await, DomainState::Running);
    // From then on, it can begin another migration.
    timeout(DEADLINE, wait_for_no_job(&watching, domain)).await.unwrap();
    watching.migrate_begin(domain, &parameters(FLAGS), FLAGS, DEADLINE).await.unwrap();
}
