//! Bad input and refusals: each gets a clear error and the right exit code, and the VM runs on.

mod certificates;
mod hosts;
mod permissions;
mod requests;
mod specifications;

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    ("requests_that_make_no_sense", requests::that_make_no_sense),
    ("one_migration_of_a_vm_at_a_time", requests::one_migration_of_a_vm_at_a_time),
    ("a_target_short_of_memory", requests::a_target_short_of_memory),
    ("an_agent_that_does_not_answer", hosts::an_agent_that_does_not_answer),
    ("migration_ports_all_taken", hosts::migration_ports_all_taken),
    ("configurations_that_start_no_agent", hosts::configurations_that_start_no_agent),
    ("invalid_specifications", specifications::invalid),
    ("bad_certificates", certificates::bad_certificates),
    ("an_operator_works_over_tls", permissions::an_operator_works_over_tls),
    ("a_host_manages_no_vms_of_another", permissions::a_host_manages_no_vms_of_another),
];
