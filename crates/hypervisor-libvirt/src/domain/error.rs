//! Why a domain's XML is not understood.

/// Why a domain's XML is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DomainXmlError {
    /// More than libvirt sends.
    #[error("the domain's XML has {bytes} bytes: at most {most} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// How large it may be.
        most: usize,
    },
    /// More of something than a domain has.
    #[error("the domain's XML has too many {what}: at most {most} are read")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
    /// Document types bring entities, which libvirt never writes.
    #[error("the domain's XML has a document type, which libvirt never writes")]
    DocumentType,
    /// Not well-formed.
    #[error("the domain's XML cannot be parsed: {0}")]
    NotXml(String),
    /// XML of something else.
    #[error("the XML is not that of a domain: its root is `<{root}>`")]
    NotADomain {
        /// The root element's name.
        root: String,
    },
    /// Something that every domain has.
    #[error("the domain's XML has no `<{element}>`")]
    Missing {
        /// The element.
        element: &'static str,
    },
    /// A value that is none.
    #[error("`<{element}>` of the domain's XML: {message}")]
    Invalid {
        /// The element.
        element: &'static str,
        /// What is wrong with it.
        message: String,
    },
}
