//! Bad input and refusals: each gets a clear error and the right exit code, and the VM runs on.

mod certificates;
mod hosts;
mod permissions;
mod requests;
mod specifications;

pub(crate) use self::permissions::over_tls;
use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    ("a_second_migration_and_requests_that_make_no_sense", requests::that_cannot_be),
    ("a_target_short_of_memory", requests::a_target_short_of_memory),
    ("targets_that_cannot_take_part", hosts::targets_that_cannot_take_part),
    ("configurations_that_start_no_agent", hosts::configurations_that_start_no_agent),
    ("invalid_specifications", specifications::invalid),
    ("who_may_do_what_over_tls", permissions::who_may_do_what_over_tls),
];
