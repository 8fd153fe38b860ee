//! Locks for values that are consistent after each assignment, whichever thread panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks such a value.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
