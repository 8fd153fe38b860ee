//! Settings made while the agent runs, which apply until they are made again.

use drainpipe_engine::bandwidth::{BandwidthSetting, Limited};
use rusqlite::{OptionalExtension, params};

use super::{Journal, JournalError, from_json, to_json};

fn name(limited: Limited) -> &'static str {
    match limited {
        Limited::All => "bandwidth",
        Limited::Storage => "storage_bandwidth",
    }
}

impl Journal {
    /// A limit of the host's bandwidth, as it was set last.
    pub(crate) fn bandwidth_setting(&self, limited: Limited) -> Result<BandwidthSetting, JournalError> {
        self.run(|connection| {
            let found = connection
                .query_row("SELECT value FROM settings WHERE name = ?1", [name(limited)], |row| row.get(0))
                .optional()?;
            found.map_or(Ok(BandwidthSetting::default()), |text: String| from_json(&text))
        })
    }

    /// Records it.
    pub(crate) fn set_bandwidth_setting(
        &self,
        limited: Limited,
        setting: BandwidthSetting,
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO settings (name, value) VALUES (?1, ?2) \
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                params![name(limited), to_json(&setting)?],
            )?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_setting_outlives_the_agent() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Journal::open(directory.path(), directory.path()).unwrap();
        for limited in [Limited::All, Limited::Storage] {
            assert_eq!(open().bandwidth_setting(limited).unwrap(), BandwidthSetting::Configured);
            for setting in [BandwidthSetting::Mbps(2000), BandwidthSetting::Unlimited] {
                open().set_bandwidth_setting(limited, setting).unwrap();
                assert_eq!(open().bandwidth_setting(limited).unwrap(), setting);
            }
        }
    }
}
