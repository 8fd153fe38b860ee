//! Bounds on a domain's XML, checked before a parser sees it: it may come from another host.
//!
//! The parser compares each attribute of an element with all the others, and copies namespaces from element to
//! element, so a few megabytes made for the purpose would keep it busy for hours. Here, one pass over the bytes counts
//! both. It also refuses document types, and with them entities.

use super::error::DomainXmlError;

/// Bytes of XML. libvirt's own protocol takes no longer strings.
const BYTES_MAX: usize = 4 << 20;
/// Elements, texts and comments.
pub(super) const NODES_MAX: u32 = 65_536;
/// Elements inside each other. libvirt's own go down to some ten; a chain of 100 backing files goes deeper.
const DEPTH_MAX: usize = 512;
/// Attributes of one element. libvirt's have ten at most.
const ATTRIBUTES_MAX: usize = 32;
/// Declarations of namespaces in all of the document.
const NAMESPACES_MAX: usize = 64;

/// Checks all bounds. Text that is not XML may pass.
pub(super) fn check(xml: &str) -> Result<(), DomainXmlError> {
    if xml.len() > BYTES_MAX {
        return Err(DomainXmlError::TooLarge { bytes: xml.len(), most: BYTES_MAX });
    }
    let mut scan = Scan::of(xml);
    while scan.next_markup()? {}
    Ok(())
}

/// A pass over the markup, as far as it is well-formed.
struct Scan<'a> {
    rest: &'a [u8],
    depth: usize,
    namespaces: usize,
}

impl<'a> Scan<'a> {
    fn of(xml: &'a str) -> Self {
        Self { rest: xml.as_bytes(), depth: 0, namespaces: 0 }
    }

    /// Passes the next piece of markup; false at the end.
    fn next_markup(&mut self) -> Result<bool, DomainXmlError> {
        let Some(start) = self.rest.iter().position(|byte| *byte == b'<') else { return Ok(false) };
        self.rest = &self.rest[start..];
        let skipped = [("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>")];
        for (open, close) in skipped {
            if self.rest.starts_with(open.as_bytes()) {
                return Ok(self.skip_past(open.len(), close));
            }
        }
        if self.rest.starts_with(b"<!") {
            return Err(DomainXmlError::DocumentType);
        }
        if self.rest.starts_with(b"</") {
            self.depth = self.depth.saturating_sub(1);
            return Ok(self.skip_past(2, ">"));
        }
        self.start_tag()
    }

    fn skip_past(&mut self, from: usize, close: &str) -> bool {
        let close = close.as_bytes();
        let end = self.rest[from..].windows(close.len()).position(|window| window == close);
        self.rest = end.map_or(&[], |end| &self.rest[from + end + close.len()..]);
        end.is_some()
    }

    fn start_tag(&mut self) -> Result<bool, DomainXmlError> {
        let (mut quote, mut attributes, mut name_start) = (None, 0, 1);
        for (at, byte) in self.rest.iter().copied().enumerate().skip(1) {
            match (quote, byte) {
                (Some(open), _) if byte == open => quote = None,
                (None, b'"' | b'\'') => quote = Some(byte),
                (None, b'>') => return self.end_of_tag(at),
                (None, b'=') => {
                    attributes += 1;
                    self.count_attribute(attributes, self.rest[name_start..at].starts_with(b"xmlns"))?;
                }
                (None, b' ' | b'\t' | b'\r' | b'\n') => name_start = at + 1,
                _ => {}
            }
        }
        self.rest = &[];
        Ok(false)
    }

    fn count_attribute(&mut self, of_element: usize, is_namespace: bool) -> Result<(), DomainXmlError> {
        self.namespaces += usize::from(is_namespace);
        if of_element > ATTRIBUTES_MAX {
            return Err(DomainXmlError::TooMany { what: "attributes of an element", most: ATTRIBUTES_MAX });
        }
        if self.namespaces > NAMESPACES_MAX {
            return Err(DomainXmlError::TooMany { what: "namespaces", most: NAMESPACES_MAX });
        }
        Ok(())
    }

    fn end_of_tag(&mut self, at: usize) -> Result<bool, DomainXmlError> {
        let is_empty = self.rest[at - 1] == b'/';
        self.depth += usize::from(!is_empty);
        if self.depth > DEPTH_MAX {
            return Err(DomainXmlError::TooMany { what: "elements inside each other", most: DEPTH_MAX });
        }
        self.rest = &self.rest[at + 1..];
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// How many tags are looked at until the XML is refused.
    fn tags_looked_at(xml: &str) -> usize {
        let mut scan = Scan::of(xml);
        1 + std::iter::from_fn(|| scan.next_markup().ok().filter(|goes_on| *goes_on)).count()
    }

    #[test]
    fn takes_what_libvirt_writes() {
        for xml in [
            "",
            "<domain/>",
            "<?xml version='1.0'?><!-- <a b='c' --><domain a='>' b=\"<'/>\"><x><![CDATA[<y z=]]></x></domain>",
        ] {
            assert_eq!(check(xml), Ok(()), "{xml}");
        }
    }

    #[test]
    fn refuses_document_types_wherever_they_are() {
        for xml in ["<!DOCTYPE d [<!ENTITY a 'b'>]><d>&a;</d>", "<?xml version='1.0'?> <!DOCTYPE d><d/>"] {
            assert_eq!(check(xml), Err(DomainXmlError::DocumentType), "{xml}");
        }
    }

    #[test]
    fn refuses_what_would_keep_the_parser_busy() {
        let mut attributes = "<d ".to_owned();
        for number in 0..200_000 {
            // A `>` in a value ends nothing.
            write!(attributes, "a{number}='>' ").expect("a text takes all");
        }
        attributes.push_str("/>");
        let namespaces = format!("<d>{}</d>", "<e xmlns:a='b'/>".repeat(100_000));
        let deep = format!("{}{}", "<d>".repeat(100_000), "</d>".repeat(100_000));
        let counted = [(attributes, 1), (namespaces, 1 + NAMESPACES_MAX + 1), (deep, DEPTH_MAX + 1)];
        for (xml, tags) in counted {
            assert!(matches!(check(&xml), Err(DomainXmlError::TooMany { .. })));
            assert_eq!(tags_looked_at(&xml), tags, "it looks on after the first that is too many");
        }
        let long = " ".repeat(BYTES_MAX + 1);
        assert_eq!(check(&long), Err(DomainXmlError::TooLarge { bytes: long.len(), most: BYTES_MAX }));
    }
}
