//! An element of a domain's XML.

use std::iter;
use std::path::PathBuf;
use std::str::FromStr;

use roxmltree::{Document, Node, ParsingOptions};

use super::error::DomainXmlError;
use super::limits;
use super::words::plain;

/// Parses XML within the limits. Entities are not expanded, apart from XML's own five.
pub(super) fn parse(xml: &str) -> Result<Document<'_>, DomainXmlError> {
    limits::check(xml)?;
    let options = ParsingOptions { nodes_limit: limits::NODES_MAX, ..ParsingOptions::default() };
    Document::parse_with_options(xml, options).map_err(not_parsed)
}

fn not_parsed(error: roxmltree::Error) -> DomainXmlError {
    match error {
        roxmltree::Error::NodesLimitReached => {
            DomainXmlError::TooMany { what: "nodes", most: limits::NODES_MAX as usize }
        }
        // It may quote the document.
        other => DomainXmlError::NotXml(plain(&other.to_string())),
    }
}

/// An element and what is in it. Names without a namespace are libvirt's own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element<'a>(Node<'a, 'a>);

impl<'a> Element<'a> {
    pub(super) fn root(document: &'a Document<'a>) -> Self {
        Self(document.root_element())
    }

    /// Its name, without a prefix.
    pub(super) fn name(self) -> &'a str {
        self.0.tag_name().name()
    }

    pub(super) fn namespace(self) -> Option<&'a str> {
        // `xmlns=''` is how XML takes an element out of the namespace around it.
        self.0.tag_name().namespace().filter(|namespace| !namespace.is_empty())
    }

    /// All elements directly in it, of whatever namespace.
    pub(super) fn elements(self) -> impl Iterator<Item = Self> {
        self.0.children().filter(Node::is_element).map(Self)
    }

    /// It, and all elements in it at whatever depth.
    pub(super) fn within(self) -> impl Iterator<Item = Self> {
        self.0.descendants().filter(Node::is_element).map(Self)
    }

    /// libvirt's elements of this name directly in it.
    pub(super) fn all(self, name: &str) -> impl Iterator<Item = Self> {
        self.elements().filter(move |element| element.namespace().is_none() && element.name() == name)
    }

    /// The first one at this path, such as `os/loader`.
    pub(super) fn at(self, path: &str) -> Option<Self> {
        path.split('/').try_fold(self, |element, name| element.all(name).next())
    }

    pub(super) fn has(self, path: &str) -> bool {
        self.at(path).is_some()
    }

    pub(super) fn attribute(self, name: &str) -> Option<&'a str> {
        self.0.attribute(name)
    }

    /// All of them, of whatever namespace.
    pub(super) fn attributes(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.attributes().map(|attribute| (attribute.name(), attribute.value()))
    }

    pub(super) fn has_foreign_attributes(self) -> bool {
        self.0.attributes().any(|attribute| attribute.namespace().is_some())
    }

    /// The same as an owned text; empty is none.
    pub(super) fn text_of(self, attribute: &str) -> Option<String> {
        self.attribute(attribute).filter(|value| !value.is_empty()).map(str::to_owned)
    }

    pub(super) fn path_of(self, attribute: &str) -> Option<PathBuf> {
        self.text_of(attribute).map(PathBuf::from)
    }

    /// What is written in it; empty is none.
    pub(super) fn text(self) -> Option<String> {
        let pieces = self.0.children().filter(Node::is_text).filter_map(|node| node.text());
        Some(pieces.collect::<String>()).filter(|text| !text.is_empty())
    }

    /// A number or the like, if that is what is written in the attribute.
    pub(super) fn parsed<T: FromStr>(self, attribute: &str) -> Option<T> {
        self.attribute(attribute)?.trim().parse().ok()
    }

    pub(super) fn says_yes(self, attribute: &str) -> bool {
        matches!(self.attribute(attribute), Some("yes" | "on"))
    }

    /// It, the element of this name in it, the one of this name in that, and so on.
    pub(super) fn chain(self, name: &'a str) -> impl Iterator<Item = Self> {
        iter::successors(self.at(name), move |element| element.at(name))
    }
}
