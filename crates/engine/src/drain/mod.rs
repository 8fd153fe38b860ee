//! Emptying a host: what is known, the plan that follows from it, and the decisions while it is carried out.
//!
//! ```text
//! view              what was seen when the plan was made: VMs, targets, path histories
//! disks             which disks go with a VM, and between which devices
//! plan              which VM goes where, in which order, how long it will take; which stay, and why
//! placement         which target takes which VM
//! order             whose turn it is among those that go to several targets
//! limits            how many VMs may be under way
//! limited           what to know of bandwidth limits before it begins
//! lint              whether a plan may be carried out as it is
//! predict           what moving one VM will take
//! speeds            what the way to one target carries
//! host_links        what the host's links carry to several targets at once
//! schedule          how long all take that share the links
//! concurrency       how many VMs are on the links at a time
//! copy_concurrency  how many copy disks at a time
//! eta               when it will be over
//! stay              which VMs stay, and why
//! run               the drain under way: events in, actions out
//! ```

mod concurrency;
mod copy_concurrency;
pub mod disks;
pub mod eta;
mod host_links;
pub mod inbound;
mod limited;
pub mod limits;
pub mod lint;
mod order;
pub mod pace;
mod placement;
pub mod plan;
mod predict;
pub mod run;
mod schedule;
mod speeds;
pub mod status;
pub mod stay;
pub mod view;

#[cfg(test)]
mod tests;
