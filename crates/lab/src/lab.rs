//! A lab's life: made, used, made to fail, removed.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;

use drainpipe_machine::client::Streams;
use rustix::process::{Pid, geteuid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Serialize;

use crate::cpus::cpu_of;
use crate::emulated;
use crate::enter;
use crate::error::Error;
use crate::fault::{Fault, drops};
use crate::libvirt;
use crate::link_local;
use crate::names::lab_and_node;
use crate::processes::{self, NamespaceId};
use crate::spec::{LabSpec, LinkAddresses, SpecError, check_lab_name};
use crate::state::{self, LabLock, namespace_file};
use crate::status::{self, LabStatus, ProcessStatus};
use crate::tools;
use crate::topology;

/// A complete lab. Dropping this leaves the lab as it is; [`Lab::down`] removes it.
#[derive(Debug)]
pub struct Lab {
    spec: LabSpec,
}

/// A lab in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LabSummary {
    /// The lab's name.
    pub name: String,
    /// Its hosts; empty if it is not complete.
    pub hosts: Vec<String>,
    /// `false` for what a killed `up` or `down` left.
    pub complete: bool,
}

/// What [`Lab::down`] found and removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Removal {
    /// How many namespaces there were.
    pub namespaces: usize,
    /// How many processes were ended.
    pub processes: usize,
}

impl Lab {
    /// Makes a lab, or nothing: what was made before a failure is removed again.
    ///
    /// Remains of a lab of that name are cleared first; a lab that is up is refused.
    pub fn up(spec: LabSpec) -> Result<Self, Error> {
        spec.validate()?;
        check_machine()?;
        if spec.libvirt {
            libvirt::check_installed(&spec)?;
        }
        spec.machines.as_ref().map_or(Ok(()), emulated::check_boot_files)?;
        spec.hosts.iter().try_for_each(|host| cpu_of(&spec, host).map(drop))?;
        let lock = LabLock::acquire(&spec.name)?;
        if state::read_record(&spec.name)?.is_some() {
            return Err(Error::AlreadyUp { name: spec.name });
        }
        clear(&spec.name, &lock)?;
        if let Err(error) = make(&spec, &lock) {
            if let Err(left) = clear(&spec.name, &lock).and_then(|_| lock.remove()) {
                tracing::warn!(lab = spec.name, %left, "could not undo a lab that failed to come up");
            }
            return Err(error);
        }
        Ok(Self { spec })
    }

    /// Finds a lab that is up.
    pub fn open(name: &str) -> Result<Self, Error> {
        check_lab_name(name)?;
        check_root()?;
        let Some(spec) = state::read_record(name)? else { return Err(not_up(name)?) };
        let present: HashSet<String> = namespaces_of(name)?.into_iter().collect();
        let missing: Vec<&str> =
            spec.nodes().filter(|node| !present.contains(&spec.namespace(node))).collect();
        if !missing.is_empty() {
            let what = format!("it has lost the namespace of {}", missing.join(", "));
            return Err(Error::Incomplete { name: name.to_owned(), what });
        }
        Ok(Self { spec })
    }

    /// All labs on this machine, by name, with what is left of incomplete ones.
    pub fn list() -> Result<Vec<LabSummary>, Error> {
        check_root()?;
        let mut names: BTreeSet<String> = state::directory_names()?.into_iter().collect();
        let namespaces = state::namespace_names()?;
        let labs = namespaces.iter().filter_map(|namespace| lab_and_node(namespace));
        names.extend(labs.map(|(lab, _)| lab.to_owned()));
        names.retain(|name| check_lab_name(name).is_ok());
        let summary = |name: String| match Self::open(&name) {
            Ok(lab) => LabSummary { name, hosts: lab.spec.hosts, complete: true },
            Err(_) => LabSummary { name, hosts: Vec::new(), complete: false },
        };
        Ok(names.into_iter().map(summary).collect())
    }

    /// Removes the lab `name`, or what is left of it: ends every process in its namespaces,
    /// then removes the namespaces and the lab's directory. There may be nothing to remove.
    pub fn down(name: &str) -> Result<Removal, Error> {
        check_lab_name(name)?;
        check_machine()?;
        let lock = LabLock::acquire(name)?;
        let removal = clear(name, &lock)?;
        lock.remove()?;
        Ok(removal)
    }

    /// What the lab was made of; it also has the address plan.
    pub fn spec(&self) -> &LabSpec {
        &self.spec
    }

    /// The lab as it is now.
    pub fn status(&self) -> Result<LabStatus, Error> {
        status::read(&self.spec)
    }

    /// The processes in the namespace of `node` (a host, or [`CLIENT`](crate::CLIENT)), without the caller.
    pub fn processes(&self, node: &str) -> Result<Vec<ProcessStatus>, Error> {
        self.spec.check_node(node)?;
        status::processes_on(&self.spec.namespace(node))
    }

    /// The directory for the files of `node` (a host, or [`CLIENT`](crate::CLIENT)), such as an
    /// agent's; root's alone, removed by [`Lab::down`].
    pub fn node_dir(&self, node: &str) -> Result<PathBuf, Error> {
        self.spec.check_node(node)?;
        Ok(state::directory(&self.spec.name).join(node))
    }

    /// A command that runs `program` in the namespace of `node` (a host, or
    /// [`CLIENT`](crate::CLIENT)), with the `/sys` of that namespace, and the machine's control groups in it.
    pub fn command(&self, node: &str, program: impl AsRef<OsStr>) -> Result<Command, Error> {
        self.check_no_machine(node)?;
        let mut words = enter::words(&self.spec, node)?.into_iter();
        let mut command = Command::new(words.next().expect("the way in has a first word"));
        command.args(words).arg(program);
        Ok(command)
    }

    /// Runs a program in the machine of `host`, in an emulated lab, to its end: its exit code, or 128 and the number of the
    /// signal that ended it. If the caller ends first, so does the program.
    pub fn exec(&self, host: &str, words: Vec<String>, streams: Streams<'_>) -> Result<i32, Error> {
        emulated::exec(&self.spec, host, words, streams)
    }

    /// Starts a daemon in the namespace of `node`: in a session of its own, so that it outlives
    /// the caller and its terminal, with its output appended to `log`.
    ///
    /// Returns once it is in the namespace, from where [`Lab::down`] will end it.
    pub fn spawn<A: AsRef<OsStr>>(&self, node: &str, arguments: &[A], log: &Path) -> Result<Child, Error> {
        self.check_no_machine(node)?;
        let entering = enter::words(&self.spec, node)?;
        let lock = self.lock()?;
        enter::spawn(&self.spec.namespace(node), &entering, arguments, log, &lock)
    }

    /// Runs `work` in a thread of its own in the namespace of `node`: sockets that it opens
    /// belong to that node.
    pub fn run_in<T: Send>(&self, node: &str, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        self.spec.check_node(node)?;
        let path = namespace_file(&self.spec.namespace(node));
        let namespace = std::fs::File::open(&path).map_err(Error::io("open", &path))?;
        let entered = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .map(|()| work())
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        entered.map_err(io::Error::from).map_err(Error::io("enter the namespace", path))
    }

    /// Where programs outside the host's namespaces reach the libvirt of `host`:
    /// `virsh -c 'qemu:///system?socket=FILE'`.
    pub fn libvirt_socket(&self, host: &str) -> Result<PathBuf, Error> {
        libvirt::check_host(&self.spec, host)?;
        Ok(libvirt::socket(&self.spec, host)?)
    }

    /// The daemon of the libvirt of `host`, by its number outside the host's own process ids; none if it does not run.
    pub fn libvirt_pid(&self, host: &str) -> Result<Option<Pid>, Error> {
        libvirt::check_host(&self.spec, host)?;
        libvirt::daemon(&self.spec, host)
    }

    /// Makes something in this lab fail, or puts it right again.
    pub fn fault(&self, fault: &Fault) -> Result<(), Error> {
        if let Fault::Libvirt { host, change } = fault {
            libvirt::check_host(&self.spec, host)?;
            return libvirt::change(&self.spec, host, *change, &self.lock()?);
        }
        let batches = fault.changes(&self.spec)?;
        let lock = self.lock()?;
        batches.iter().try_for_each(|batch| batch.run(&lock))?;
        match (&self.spec.machines, fault) {
            (
                Some(_),
                Fault::LinkDown { link, .. } | Fault::LinkUp { link, .. } | Fault::Heal { link, .. },
            ) => emulated::follow_carriers(&self.spec, link),
            _ => Ok(()),
        }
    }

    /// In the namespace of a machine there is nothing that a program could be run for.
    fn check_no_machine(&self, node: &str) -> Result<(), SpecError> {
        if !self.spec.is_machine(node) {
            return Ok(());
        }
        let instead = "run programs in it with `drainpipe lab exec`";
        Err(SpecError::IsMachine { lab: self.spec.name.clone(), host: node.to_owned(), instead })
    }

    /// Keeps the lab from being removed meanwhile; fails if it has been already.
    fn lock(&self) -> Result<LabLock, Error> {
        let lock = LabLock::acquire(&self.spec.name)?;
        match state::read_record(&self.spec.name)? {
            Some(spec) if spec == self.spec => Ok(lock),
            _ => Err(not_up(&self.spec.name)?),
        }
    }
}

fn check_root() -> Result<(), Error> {
    geteuid().is_root().then_some(()).ok_or(Error::NotRoot)
}

fn check_machine() -> Result<(), Error> {
    check_root()?;
    tools::check_installed()
}

fn make(spec: &LabSpec, lock: &LabLock) -> Result<(), Error> {
    lock.create_directories(spec.nodes())?;
    topology::build(spec).iter().try_for_each(|batch| batch.run(lock))?;
    if let Some(machines) = &spec.machines {
        emulated::start_all(spec, machines, lock)?;
    } else if spec.link_addresses == LinkAddresses::LinkLocal {
        link_local::wait(spec)?;
    }
    let [receive, _] = drops(spec, &spec.hosts[0], &spec.link_names()[0])?;
    receive.check().run(lock)?;
    if spec.libvirt {
        libvirt::start_all(spec, lock)?;
    }
    lock.write_record(spec)
}

/// Removes everything that bears the lab's name. Each step leaves what the next call needs to
/// find the rest: the record goes first, the directory last.
fn clear(name: &str, lock: &LabLock) -> Result<Removal, Error> {
    lock.remove_record()?;
    let namespaces = namespaces_of(name)?;
    let ids = namespaces.iter().filter_map(|name| NamespaceId::of_file(&namespace_file(name)));
    let processes = processes::end(name, ids.collect())?;
    lock.create_directories([].into_iter())?;
    topology::remove_namespaces(&namespaces).run(lock)?;
    lock.remove_directory()?;
    Ok(Removal { namespaces: namespaces.len(), processes })
}

fn namespaces_of(lab: &str) -> Result<Vec<String>, Error> {
    let mut names = state::namespace_names()?;
    names.retain(|name| lab_and_node(name).is_some_and(|(owner, _)| owner == lab));
    Ok(names)
}

/// The error for a lab that has no record.
fn not_up(name: &str) -> Result<Error, Error> {
    let name = name.to_owned();
    if state::directory_names()?.contains(&name) || !namespaces_of(&name)?.is_empty() {
        let what = "it was being made or removed when that was interrupted".to_owned();
        return Ok(Error::Incomplete { name, what });
    }
    let labs = Lab::list()?.into_iter().filter(|lab| lab.complete);
    Ok(Error::NoSuchLab { name, existing: labs.map(|lab| lab.name).collect() })
}
