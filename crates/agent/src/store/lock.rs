//! Locking values that are whole after each assignment, whoever panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks such a value.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
