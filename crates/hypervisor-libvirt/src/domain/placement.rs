//! Our own metadata of a domain: where it may be when a host is emptied.
//!
//! ```xml
//! <metadata>
//!   <drainpipe:placement xmlns:drainpipe="urn:drainpipe:placement:1">
//!     <drainpipe:stays>licence bound to this host</drainpipe:stays>
//!     <drainpipe:apart>db</drainpipe:apart>
//!     <drainpipe:together>shop</drainpipe:together>
//!   </drainpipe:placement>
//! </metadata>
//! ```
//!
//! `virsh metadata DOMAIN urn:drainpipe:placement:1 --key drainpipe --set '<placement>…</placement>'` writes it.

use std::collections::BTreeSet;

use drainpipe_hypervisor::spec::{GroupName, NameError, Placement};

use super::element::Element;
use super::words::plain;

/// The namespace of our metadata.
pub const NAMESPACE: &str = "urn:drainpipe:placement:1";

/// Why our metadata of a domain is not understood. It is never guessed where a VM may be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// An element that means nothing.
    #[error(
        "`<{element}>` in the metadata of {NAMESPACE} means nothing: it takes `<placement>` with `<stays>`, `<apart>` and \
         `<together>`; correct it with `virsh metadata`"
    )]
    UnknownElement {
        /// The element.
        element: String,
    },
    /// Said twice.
    #[error(
        "`<{element}>` in the metadata of {NAMESPACE} is there twice: leave one; `virsh metadata` changes it"
    )]
    Twice {
        /// The element.
        element: &'static str,
    },
    /// A group that cannot be one.
    #[error("`<{element}>` in the metadata of {NAMESPACE}: {error}; `virsh metadata` changes it")]
    Group {
        /// The element.
        element: &'static str,
        /// What is wrong.
        error: NameError,
    },
}

pub(super) fn parse(metadata: Option<Element<'_>>) -> Result<Placement, PlacementError> {
    let all = metadata.into_iter().flat_map(Element::elements);
    let mut ours = all.filter(|element| element.namespace() == Some(NAMESPACE));
    let Some(placement) = ours.next() else { return Ok(Placement::default()) };
    if placement.name() != "placement" {
        return Err(unknown(placement));
    }
    match ours.next() {
        Some(_) => Err(PlacementError::Twice { element: "placement" }),
        None => rules(placement),
    }
}

fn unknown(element: Element<'_>) -> PlacementError {
    PlacementError::UnknownElement { element: plain(element.name()) }
}

fn rules(placement: Element<'_>) -> Result<Placement, PlacementError> {
    let mut rules = Placement::default();
    for element in placement.elements() {
        let is_ours = element.namespace().is_none_or(|namespace| namespace == NAMESPACE);
        match element.name() {
            "stays" if is_ours => stays(&mut rules.stays, element)?,
            "apart" if is_ours => group(&mut rules.apart, "apart", element)?,
            "together" if is_ours => group(&mut rules.together, "together", element)?,
            _ => return Err(unknown(element)),
        }
    }
    Ok(rules)
}

fn stays(reason: &mut Option<String>, element: Element<'_>) -> Result<(), PlacementError> {
    let text = element.text().unwrap_or_default().trim().to_owned();
    match reason.replace(text) {
        Some(_) => Err(PlacementError::Twice { element: "stays" }),
        None => Ok(()),
    }
}

fn group(
    groups: &mut BTreeSet<GroupName>,
    name: &'static str,
    element: Element<'_>,
) -> Result<(), PlacementError> {
    let text = element.text().unwrap_or_default();
    let group = plain(text.trim()).parse().map_err(|error| PlacementError::Group { element: name, error })?;
    groups.insert(group);
    Ok(())
}
