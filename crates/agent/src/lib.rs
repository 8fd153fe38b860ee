//! One agent per host: its API, its journal, and the executor of the engine's actions.
//!
//! The main modules, the top first: none imports one that stands above it (`crates/agent/layers` has all of them in
//! order; docs/decisions/0065).
//!
//! ```text
//! app        makes the parts; start and stop
//! watchdog   tells the service manager that the agent answers
//! server     connections; client: the other end of them; places: who gets in when there are too many
//! core_count counts the cores that are left to migrations, and those that VMs take
//! unresponsive VMs whose QEMU did not answer when the agent started
//! api        paths, who may do what; api_types: what travels
//! setup      makes a fleet, or joins one, before the agent runs
//! joining    who comes to the fleet and who leaves it; renewal: certificates that are about to end
//! fixes      what a check has mended on this host, until it is undone
//! drain      empties this host, and brings back what left it
//! outgoing   migrations from here; its executor carries out what the engine says
//! check      tries everything between this host and another
//! incoming   migrations to here: the target's promises, and what may come to run here
//! transfer   what migrations in either direction share
//! bandwidth  limits of what they take of the links
//! cpu_priority the VM that is silent has the cores first
//! session_weight how much of the cores a session has
//! discovery  which links reach which of the other host, by link-local addresses
//! path_watch the paths to each peer, and the route over them
//! relay      the connections of a migration that is compressed or encrypted
//! scheduling_group among which threads the kernel weighs priorities
//! guard      lets a VM run on when the agent cannot
//! vms        the VMs of this host; hypervisors: what runs them
//! vm_files   the files that VMs name, and whether they may use them here
//! proof      whether the journal is believed, and what is done where it is not
//! release    whether another host's is one that this one understands
//! peers      the other hosts: the ways to their agents
//! fleet      the hosts that have joined, as the authority lists them
//! host       this host: its name, configuration, hardware and ports
//! network    changes of the host's network, journaled and put back
//! journal    what must survive a crash
//! ```

mod api;
pub mod api_types;
pub mod app;
mod bandwidth;
mod beside;
mod check;
mod chosen_address;
pub mod client;
pub mod config;
mod core_count;
mod cpu_list;
mod cpu_priority;
mod descriptors;
mod discovery;
mod disk_moves;
mod disk_socket;
mod disk_streams;
mod drain;
mod fixes;
mod fleet;
mod fleet_files;
mod fleet_list;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod guard;
mod hooks;
mod host;
mod hypervisors;
mod idle_cores;
mod incoming;
mod joining;
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
mod own_waits;
mod pacer;
mod path_counters;
mod path_history;
mod path_watch;
mod peers;
mod places;
mod ports;
mod probe;
mod proof;
mod relay;
mod release;
mod renewal;
mod result;
mod scheduling_group;
mod server;
mod session_weight;
pub mod setup;
mod slots;
mod source_state;
mod supervised;
#[cfg(test)]
mod test_host;
mod throttles;
mod tracking;
mod transfer;
mod transport;
mod unresponsive;
mod vm_cores;
mod vm_end;
mod vm_files;
mod vms;
mod watchdog;
