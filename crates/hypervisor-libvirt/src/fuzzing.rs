//! Parsers of a peer's bytes, as functions of bytes: each asserts what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes.

use std::fmt;

use crate::domain::{DomainDescription, refusal};

/// The memory that XML of a few kilobytes takes, as a tree and as values.
pub const DOMAIN_HOLDS_BYTES: usize = 8 << 20;

/// What is said of a domain, with a few names of it, each cut.
const WORDS_BYTES_MAX: usize = 8192;

/// A domain's XML.
///
/// Holds: what is made of it as a specification is valid. What is said of it is short, and safe on a terminal.
pub fn domain(data: &[u8]) {
    let Ok(xml) = std::str::from_utf8(data) else { return };
    let domain = match DomainDescription::parse(xml) {
        Ok(domain) => domain,
        Err(error) => return check_words(&error),
    };
    check_all(&domain.obstacles());
    check_all(&domain.doubts());
    domain.needs().iter().for_each(check_words);
    match domain.vm_spec() {
        Ok(spec) => {
            spec.validate().expect("it was checked");
            refusal(xml, &spec).iter().for_each(check_words);
        }
        Err(reasons) => {
            assert!(!reasons.is_empty(), "no specification, and no reason");
            check_all(&reasons);
        }
    }
}

fn check_all<T: fmt::Display>(said: &[T]) {
    said.iter().for_each(check_words);
}

fn check_words(said: &impl fmt::Display) {
    let words = said.to_string();
    let is_short = (1..=WORDS_BYTES_MAX).contains(&words.len());
    assert!(is_short && !words.contains(char::is_control), "{words:?}");
}

/// Domains of many kinds.
pub fn domain_seeds() -> Vec<Vec<u8>> {
    [
        include_str!("../tests/domains/debian.xml"),
        include_str!("../tests/domains/windows.xml"),
        include_str!("../tests/domains/numa.xml"),
        include_str!("../tests/domains/host-devices.xml"),
    ]
    .map(|xml| xml.as_bytes().to_vec())
    .to_vec()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_fuzzed_holds_for_its_seeds() {
        for seed in domain_seeds() {
            domain(&seed);
            assert!(std::str::from_utf8(&seed).is_ok_and(|xml| DomainDescription::parse(xml).is_ok()));
        }
    }

    /// Part of a seed in the place of part of another one, and some bytes of any kind.
    fn changed(from: (usize, usize, usize), to: (usize, usize), bytes: &[u8]) -> Vec<u8> {
        let seeds = domain_seeds();
        let (donor, start, length) = from;
        let donor = &seeds[donor % seeds.len()];
        let start = start % donor.len();
        let piece = &donor[start..donor.len().min(start + length)];
        let mut changed = seeds[to.0 % seeds.len()].clone();
        let at = to.1 % changed.len();
        let end = changed.len().min(at + length);
        changed.splice(at..end, piece.iter().chain(bytes).copied());
        changed
    }

    proptest! {
        #[test]
        fn any_text_is_a_domain_or_an_error(text in ".{0,200}") {
            domain(text.as_bytes());
        }

        #[test]
        fn a_changed_domain_is_a_domain_or_an_error(
            from in (any::<usize>(), any::<usize>(), 0_usize..200),
            to in (any::<usize>(), any::<usize>()),
            bytes in prop::collection::vec(any::<u8>(), 0..8),
        ) {
            domain(&changed(from, to, &bytes));
        }

        /// Well-formed, with texts of any kind where a domain has its own.
        #[test]
        fn a_domain_may_say_anything(which in any::<usize>(), text in "[^<&'\u{0}-\u{8}\u{b}-\u{1f}]{0,80}") {
            let seeds = domain_seeds();
            let seed = String::from_utf8(seeds[which % seeds.len()].clone()).expect("UTF-8");
            let attributes: Vec<usize> = seed.match_indices("='").map(|(at, _)| at + 2).collect();
            let at = attributes[which / seeds.len() % attributes.len()];
            let end = at + seed[at..].find('\'').expect("an attribute ends");
            domain([&seed[..at], &text, &seed[end..]].concat().as_bytes());
            let name = seed.find("<name>").expect("a domain has one") + "<name>".len();
            domain([&seed[..name], &text, &seed[name..]].concat().as_bytes());
        }
    }
}
