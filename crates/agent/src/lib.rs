//! One agent per host: its API, its journal, and the executor of the engine's actions.
//!
//! ```text
//! agent      what the parts share; start and stop
//! api        paths, types, who may do what
//! server     connections; client: the other end of them; places: who gets in when there are too many
//! vms        the VMs of this host
//! vm_files   the files that VMs name, and whether they may use them here
//! admission  what may come to run here
//! outgoing   migrations from here; its executor carries out what the engine says
//! drain      empties this host, and brings back what left it
//! incoming   migrations to here: the target's promises
//! check      tries everything between this host and another
//! fixes      what a check has mended on this host, until it is undone
//! discovery  which links reach which of the other host, by link-local addresses
//! idle_cores cores that are left to migrations, and those that VMs take
//! guard      lets a VM run on when the agent cannot
//! journal    what must survive a crash
//! path_watch the paths to each peer, and the route over them
//! unresponsive VMs whose QEMU did not answer when the agent started
//! proof      whether the journal is believed, and what is done where it is not
//! release    whether another host's is one that this one understands
//! cpu_priority the VM that is silent has the cores first
//! scheduling_group among which threads the kernel weighs priorities
//! session_weight how much of the cores a session has
//! watchdog   tells the service manager that the agent answers
//! network    changes of the host's network, journaled and put back
//! ```

mod admission;
pub mod agent;
pub mod api;
mod bandwidth;
mod check;
mod chosen_address;
pub mod client;
pub mod config;
mod cpu_list;
mod cpu_priority;
mod descriptors;
mod discovery;
mod drain;
mod fixes;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod guard;
mod host;
mod idle_cores;
mod incoming;
mod journal;
mod link_socket;
mod lock;
mod look_pace;
mod measure;
mod memory_look;
mod migration_links;
mod multichannel;
mod network;
mod outgoing;
mod pacer;
mod path_counters;
mod path_history;
mod path_watch;
mod places;
mod ports;
mod probe;
mod proof;
mod relay;
mod release;
mod result;
mod scheduling_group;
mod server;
mod session_weight;
mod slots;
mod supervised;
mod throttles;
mod transport;
mod unresponsive;
mod vm_cores;
mod vm_end;
mod vm_files;
mod vms;
mod watchdog;
