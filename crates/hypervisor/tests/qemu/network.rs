//! Taps and bridges, in a network namespace of the test's own.
