//! Every option moves a guest there and back.

use drainpipe_engine::option::MigrationOption;

use crate::Test;
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] = &[("tcp_moves_a_guest_there_and_back", tcp_moves_a_guest_there_and_back)];

fn tcp_moves_a_guest_there_and_back() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    let before = lab.network();
    let result = lab.migrate("web", "b", &["--option", "tcp"]);
    assert_eq!(result.option, MigrationOption::Tcp);
    guest.assert_intact();
    lab.migrate("web", "a", &["--option", "tcp"]);
    guest.assert_intact();
    assert_eq!(lab.network(), before);
}
