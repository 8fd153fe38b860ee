//! Why a migration was not over in time.

use super::Migration;
use crate::finding::code::FindingCode;
use crate::format::seconds;

impl Migration {
    pub(super) fn not_over_in_time(&self, now_ms: f64) -> String {
        let within = format!("not over within {}", seconds(self.total_ms()));
        let longer = "`migrate --deadline`, or [limits] deadline_s in agent.toml, allows more time";
        if self.meter.is_stalled(now_ms) {
            return format!("{within}: {}", self.nothing_arrived(now_ms));
        }
        if let Some(finding) = self.record.finding(FindingCode::RouteTaken) {
            return format!("{within}: {}; {}", finding.what, finding.remedy);
        }
        match self.outpaced() {
            Some(outpaced) => format!("{within}: {outpaced}; {}", outpaced.what_helps()),
            None if self.meter.rounds() <= 1 => {
                format!("{within}: the paths are too slow to send its memory once in that time; {longer}")
            }
            None => format!("{within}, though memory gets dirty more slowly than it is sent; {longer}"),
        }
    }

    pub(super) fn nothing_arrived(&self, now_ms: f64) -> String {
        let silence = seconds(self.meter.silent_ms(now_ms));
        let waiting = self.meter.stalled_paths(now_ms);
        // What waited on one that is out waits on the others since.
        let out: Vec<_> =
            self.record.paths_out().iter().filter(|path| !waiting.contains(path)).cloned().collect();
        let said = |before: &str, paths: &[String], after: &str| match paths {
            [] => String::new(),
            paths => format!("{before}{}{after}", paths.join(", ")),
        };
        let over = said(" over ", &waiting, "");
        let beside = said(" (out of use: ", &out, ")");
        format!("nothing has arrived for {silence}{over}{beside}; look at the links of both hosts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Finding, Place};
    use crate::migration::in_flight::copying;
    use crate::migration::{SourceAction, SourceEvent};
    use crate::transfer::transferred::Transferred;

    /// Until the deadline, the given MiB/s arrive, in the first round or in a round each second, and the given MiB/s get
    /// dirty.
    fn undone_at_the_deadline(
        mut migration: Migration,
        is_first_round: bool,
        sent: u64,
        dirty: u64,
    ) -> String {
        const MIB: u64 = 1 << 20;
        let total_bytes = 4_096 * MIB;
        for second in 1..20 {
            let sent_bytes = second * sent * MIB;
            let transferred = Transferred {
                sent_bytes,
                remaining_bytes: total_bytes / 2,
                total_bytes,
                rounds: if is_first_round { 1 } else { second + 1 },
                passed_bytes: sent_bytes,
                dirty_bytes_per_s: dirty * MIB,
            };
            let now_ms = 1_000.0 + second as f64 * 1_000.0;
            let next = migration.handle(now_ms, SourceEvent::Progress(transferred, vec![]));
            if next == Some(SourceAction::StopTransfer) {
                return migration.error().unwrap().to_string();
            }
            assert_eq!(next, None);
        }
        panic!("it is not undone at the deadline: {:?}", migration.log())
    }

    #[test]
    fn the_deadline_s_error_says_that_memory_changes_faster_than_it_is_sent_and_what_helps() {
        let error = undone_at_the_deadline(copying(), false, 100, 200);
        let changes = "the VM's memory changes at 1.68 Gb/s, and 0.84 Gb/s of it are sent";
        for words in
            ["not over within 20 s: ", changes, "`--throttle 99` or `--post-copy` moves it nevertheless"]
        {
            assert!(error.contains(words), "`{words}` is missing: {error}");
        }
    }

    #[test]
    fn the_deadline_s_error_tells_slow_paths_from_too_little_time() {
        let error = undone_at_the_deadline(copying(), true, 100, 200);
        assert!(error.contains("the paths are too slow to send its memory once"), "{error}");
        assert!(error.contains("`migrate --deadline`"), "{error}");
        let error = undone_at_the_deadline(copying(), false, 100, 50);
        assert!(error.contains("though memory gets dirty more slowly than it is sent"), "{error}");
        assert!(error.contains("`migrate --deadline`") && !error.contains("--post-copy"), "{error}");
    }

    #[test]
    fn the_deadline_s_error_blames_a_route_that_was_taken_and_not_the_vm() {
        let mut migration = copying();
        let taken = Finding::new(FindingCode::RouteTaken, [Place::host("a")])
            .what("the route of a to b is another program's")
            .effect("all goes over one link")
            .remedy("on a: ip route del 10.77.255.12");
        // It came after the check that would have refused the migration for it.
        let taken = Finding { refuses_migration: false, ..taken };
        migration.handle(2_000.0, SourceEvent::Found(taken));
        let error = undone_at_the_deadline(migration, false, 100, 200);
        let blamed =
            "not over within 20 s: the route of a to b is another program's; on a: ip route del 10.77.255.12";
        assert_eq!(error, blamed);
    }
}
