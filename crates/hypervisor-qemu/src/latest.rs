//! A value that is replaced now and then, and lent all the time. What was lent stays valid: earlier versions are kept
//! as long as the whole, so this is for what seldom changes.

use std::sync::OnceLock;

/// The versions of a value.
#[derive(Debug)]
pub(crate) struct Latest<T> {
    value: T,
    next: OnceLock<Box<Self>>,
}

impl<T> Latest<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value, next: OnceLock::new() }
    }

    /// The last one.
    pub(crate) fn get(&self) -> &T {
        &self.last().value
    }

    /// Adds one.
    pub(crate) fn set(&self, value: T) {
        let mut added = Box::new(Self::new(value));
        // Somebody else may have added one meanwhile.
        while let Err(again) = self.last().next.set(added) {
            added = again;
        }
    }

    fn last(&self) -> &Self {
        let mut at = self;
        while let Some(next) = at.next.get() {
            at = next;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lent_stays_and_who_asks_gets_the_last() {
        let latest = Latest::new(1);
        let lent = latest.get();
        latest.set(2);
        latest.set(3);
        assert_eq!((*lent, *latest.get()), (1, 3));
    }
}
