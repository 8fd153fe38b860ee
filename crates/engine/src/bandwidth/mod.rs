//! How much of a host's links migrations may take: limits by the clock, shared among those in flight.
//!
//! Traffic that leaves a host and traffic that comes to it are limited separately, because links carry both at once.
//! One limit covers everything that migrations send, another one disks alone; [`classes`] divides it between the two.

pub mod classes;
pub mod pacing;
pub mod wire_rate;

use std::collections::BTreeSet;

use jiff::civil::{DateTime, Time, Weekday};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a limit holds for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Limited {
    /// All that migrations send.
    #[default]
    All,
    /// Disks alone.
    Storage,
}

impl Limited {
    /// Whether it is the one that 0.1.0 has.
    pub fn is_all(&self) -> bool {
        *self == Self::All
    }
}

/// The limits of a host, as its configuration has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BandwidthSchedule {
    /// Mb/s where no window says otherwise; absent for no limit.
    pub mbps: Option<u64>,
    /// The same, of disks alone.
    pub storage_mbps: Option<u64>,
    /// Times at which another limit holds.
    #[serde(rename = "window")]
    pub windows: Vec<BandwidthWindow>,
}

/// A time of the day at which other limits hold, by the host's clock.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BandwidthWindow {
    /// Mb/s; absent where it says nothing of that limit.
    #[serde(default)]
    pub mbps: Option<u64>,
    /// The same, of disks alone.
    #[serde(default)]
    pub storage_mbps: Option<u64>,
    /// From this time on.
    pub from: Time,
    /// Up to this time; of the next day where that is not after `from`.
    pub until: Time,
    /// The days on which it begins; absent for every day.
    #[serde(default)]
    pub days: Option<Vec<Day>>,
}

/// A day of the week.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Day {
    /// Monday.
    Mon,
    /// Tuesday.
    Tue,
    /// Wednesday.
    Wed,
    /// Thursday.
    Thu,
    /// Friday.
    Fri,
    /// Saturday.
    Sat,
    /// Sunday.
    Sun,
}

impl Day {
    fn is(self, weekday: Weekday) -> bool {
        let own = match self {
            Self::Mon => Weekday::Monday,
            Self::Tue => Weekday::Tuesday,
            Self::Wed => Weekday::Wednesday,
            Self::Thu => Weekday::Thursday,
            Self::Fri => Weekday::Friday,
            Self::Sat => Weekday::Saturday,
            Self::Sun => Weekday::Sunday,
        };
        own == weekday
    }
}

impl BandwidthWindow {
    fn holds_at(&self, now: DateTime) -> bool {
        let (time, today) = (now.time(), now.weekday());
        let begins_on =
            |weekday| self.days.as_ref().is_none_or(|days| days.iter().any(|day| day.is(weekday)));
        if self.from < self.until {
            return begins_on(today) && (self.from..self.until).contains(&time);
        }
        (begins_on(today) && time >= self.from) || (begins_on(today.previous()) && time < self.until)
    }
}

impl BandwidthSchedule {
    /// The part for disks alone, as a schedule of its own.
    #[must_use]
    pub fn of_storage(&self) -> Self {
        let of_storage = |window: &BandwidthWindow| BandwidthWindow {
            mbps: window.storage_mbps,
            storage_mbps: None,
            ..window.clone()
        };
        let windows = self.windows.iter().map(of_storage).collect();
        Self { mbps: self.storage_mbps, storage_mbps: None, windows }
    }

    /// Mb/s that hold at this time of the host's clock: the least of the windows that apply, or else the
    /// general limit.
    pub fn limit_mbps(&self, now: DateTime) -> Option<u64> {
        let windows = self.windows.iter().filter(|window| window.holds_at(now));
        windows.filter_map(|window| window.mbps).min().or(self.mbps)
    }

    /// The limits that hold later, within a day, the first first.
    pub fn changes(&self, now: DateTime) -> Vec<LimitChange> {
        let (today, tomorrow) = (now.date(), now.date().tomorrow().ok());
        let times = self.windows.iter().flat_map(|window| [window.from, window.until]);
        let moments = times.flat_map(|time| [Some(today), tomorrow].map(|day| Some(day?.to_datetime(time))));
        let is_within_a_day = |at: &DateTime| *at > now && (at.date() == today || at.time() < now.time());
        let moments: BTreeSet<DateTime> = moments.flatten().filter(is_within_a_day).collect();
        let (mut held_mbps, mut changes) = (self.limit_mbps(now), vec![]);
        for at in moments {
            let limit_mbps = self.limit_mbps(at);
            if limit_mbps != held_mbps {
                changes.push(LimitChange { at, limit_mbps });
                held_mbps = limit_mbps;
            }
        }
        changes
    }
}

/// That another limit begins to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitChange {
    /// When, by the host's clock.
    #[schema(value_type = String)]
    pub at: DateTime,
    /// Mb/s that hold from then on; absent for no limit.
    pub limit_mbps: Option<u64>,
}

/// What somebody has set while the agent runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BandwidthSetting {
    /// What the configuration says.
    #[default]
    Configured,
    /// No limit, whatever the configuration says.
    Unlimited,
    /// This many Mb/s, 1 at least, whatever the configuration says.
    Mbps(u64),
}

impl BandwidthSetting {
    /// Mb/s that hold at this time of the host's clock.
    pub fn limit_mbps(self, configured: &BandwidthSchedule, now: DateTime) -> Option<u64> {
        match self {
            Self::Configured => configured.limit_mbps(now),
            Self::Unlimited => None,
            Self::Mbps(mbps) => Some(mbps),
        }
    }

    /// The limits that hold later, within a day, the first first. What was set holds until it is set again.
    pub fn changes(self, configured: &BandwidthSchedule, now: DateTime) -> Vec<LimitChange> {
        match self {
            Self::Configured => configured.changes(now),
            Self::Unlimited | Self::Mbps(_) => vec![],
        }
    }
}

/// Divides a limit among migrations that could use `wanted_mbps` each: max–min fairness. None gets more
/// than it wants, nor less than 1 Mb/s; what one does not want goes to the others in equal parts.
pub fn fair_shares(limit_mbps: u64, wanted_mbps: &[u64]) -> Vec<u64> {
    let mut by_want: Vec<usize> = (0..wanted_mbps.len()).collect();
    by_want.sort_by_key(|index| wanted_mbps[*index]);
    let mut shares = vec![0; wanted_mbps.len()];
    let mut left_mbps = limit_mbps;
    for (position, index) in by_want.into_iter().enumerate() {
        let equal_mbps = left_mbps / (wanted_mbps.len() - position) as u64;
        let share_mbps = equal_mbps.min(wanted_mbps[index]);
        shares[index] = share_mbps.max(1);
        left_mbps -= share_mbps;
    }
    shares
}

#[cfg(test)]
mod tests {
    use jiff::civil::{date, time};
    use proptest::prelude::*;

    use super::*;

    fn window(mbps: u64, from: Time, until: Time, days: Option<Vec<Day>>) -> BandwidthWindow {
        BandwidthWindow { mbps: Some(mbps), storage_mbps: None, from, until, days }
    }

    // 21 November 2026 is a Saturday.
    fn saturday(hour: i8, minute: i8) -> DateTime {
        date(2026, 11, 21).at(hour, minute, 0, 0)
    }

    #[test]
    fn the_least_window_that_applies_holds_or_else_the_general_limit() {
        let schedule = BandwidthSchedule {
            mbps: Some(5000),
            storage_mbps: None,
            windows: vec![
                window(2000, time(8, 0, 0, 0), time(20, 0, 0, 0), None),
                window(500, time(12, 0, 0, 0), time(13, 0, 0, 0), None),
            ],
        };
        for (hour, minute, mbps) in [(7, 59, 5000), (8, 0, 2000), (12, 30, 500), (13, 0, 2000), (20, 0, 5000)]
        {
            assert_eq!(schedule.limit_mbps(saturday(hour, minute)), Some(mbps), "{hour}:{minute}");
        }
        assert_eq!(BandwidthSchedule::default().limit_mbps(saturday(12, 0)), None);
    }

    #[test]
    fn a_window_over_midnight_belongs_to_the_day_on_which_it_begins() {
        let friday_night = window(100, time(22, 0, 0, 0), time(6, 0, 0, 0), Some(vec![Day::Fri]));
        let holds = |day: i8, hour| friday_night.holds_at(date(2026, 11, day).at(hour, 0, 0, 0));
        assert_eq!(
            [holds(20, 21), holds(20, 22), holds(21, 5), holds(21, 6), holds(21, 23)],
            [false, true, true, false, false]
        );
        let always = window(100, time(0, 0, 0, 0), time(0, 0, 0, 0), None);
        assert!(always.holds_at(saturday(0, 0)) && always.holds_at(saturday(23, 59)));
    }

    #[test]
    fn what_was_set_goes_before_the_configuration() {
        let configured = BandwidthSchedule { mbps: Some(10), ..Default::default() };
        let limit = |setting: BandwidthSetting| setting.limit_mbps(&configured, saturday(1, 0));
        assert_eq!(limit(BandwidthSetting::Configured), Some(10));
        assert_eq!(limit(BandwidthSetting::Unlimited), None);
        assert_eq!(limit(BandwidthSetting::Mbps(3)), Some(3));
        let nights = window(5, time(22, 0, 0, 0), time(6, 0, 0, 0), None);
        let configured = BandwidthSchedule { windows: vec![nights], ..Default::default() };
        let changes = |setting: BandwidthSetting| setting.changes(&configured, saturday(1, 0)).len();
        assert_eq!(changes(BandwidthSetting::Configured), 2);
        assert_eq!((changes(BandwidthSetting::Unlimited), changes(BandwidthSetting::Mbps(3))), (0, 0));
    }

    #[test]
    fn what_holds_later_within_a_day_is_told_in_its_order() {
        let schedule = BandwidthSchedule {
            mbps: Some(8_000),
            storage_mbps: None,
            windows: vec![
                window(2_000, time(8, 0, 0, 0), time(20, 0, 0, 0), None),
                window(500, time(19, 0, 0, 0), time(20, 0, 0, 0), None),
                // Invisible beside the one before.
                window(2_000, time(9, 0, 0, 0), time(10, 0, 0, 0), None),
                window(100, time(12, 0, 0, 0), time(13, 0, 0, 0), Some(vec![Day::Wed])),
            ],
        };
        let listed = |changes: Vec<LimitChange>| -> Vec<(String, Option<u64>)> {
            changes.into_iter().map(|change| (change.at.to_string(), change.limit_mbps)).collect()
        };
        assert_eq!(
            listed(schedule.changes(saturday(10, 30))),
            [
                ("2026-11-21T19:00:00".to_owned(), Some(500)),
                ("2026-11-21T20:00:00".to_owned(), Some(8_000)),
                ("2026-11-22T08:00:00".to_owned(), Some(2_000)),
            ]
        );
        let fixed = BandwidthSchedule { mbps: Some(8_000), ..Default::default() };
        assert_eq!(fixed.changes(saturday(10, 30)), []);
    }

    fn some_window() -> impl Strategy<Value = BandwidthWindow> {
        let some_time = || (0..24_i8, 0..60_i8).prop_map(|(hour, minute)| time(hour, minute, 0, 0));
        let days = prop::option::of(prop::sample::subsequence(vec![Day::Fri, Day::Sat, Day::Sun], 0..=3));
        (1..4_u64, some_time(), some_time(), days)
            .prop_map(|(mbps, from, until, days)| window(mbps, from, until, days))
    }

    #[test]
    fn disks_have_a_schedule_of_their_own() {
        let nights = BandwidthWindow {
            storage_mbps: Some(900),
            ..window(70, time(22, 0, 0, 0), time(6, 0, 0, 0), None)
        };
        let of_memory_alone = window(80, time(10, 0, 0, 0), time(14, 0, 0, 0), None);
        let of_disks_alone = BandwidthWindow {
            mbps: None,
            storage_mbps: Some(5),
            ..window(0, time(12, 0, 0, 0), time(13, 0, 0, 0), None)
        };
        let windows = vec![nights, of_memory_alone, of_disks_alone];
        let schedule = BandwidthSchedule { mbps: Some(100), storage_mbps: Some(40), windows };
        let of_storage = schedule.of_storage();
        for (hour, all, disks) in [(23, 70, 900), (9, 100, 40), (11, 80, 40), (12, 80, 5), (20, 100, 40)] {
            let now = saturday(hour, 0);
            assert_eq!(
                (schedule.limit_mbps(now), of_storage.limit_mbps(now)),
                (Some(all), Some(disks)),
                "{hour}"
            );
        }
        assert_eq!(of_storage.changes(saturday(9, 0)).len(), 4);
    }

    proptest! {
        #[test]
        fn between_two_changes_one_limit_holds(
            mbps in prop::option::of(1..4_u64),
            windows in prop::collection::vec(some_window(), 0..4),
            now in (0..24_i8, 0..60_i8),
            then in (0..24_i8, 0..60_i8),
        ) {
            let schedule = BandwidthSchedule { mbps, storage_mbps: None, windows };
            let now = saturday(now.0, now.1);
            let today = saturday(then.0, then.1);
            let then = if today >= now { today } else { date(2026, 11, 22).at(then.0, then.1, 0, 0) };
            let changes = schedule.changes(now);
            let last = changes.iter().rfind(|change| change.at <= then);
            let held = last.map_or(schedule.limit_mbps(now), |change| change.limit_mbps);
            prop_assert_eq!(schedule.limit_mbps(then), held, "{:?}", changes);
            prop_assert!(changes.iter().all(|change| change.at > now));
        }

        #[test]
        fn shares_are_fair(
            limit in 1_u64..100_000,
            wanted in prop::collection::vec(1_u64..50_000, 1..20),
        ) {
            let shares = fair_shares(limit, &wanted);
            let least = wanted.len() as u64;
            prop_assert!(shares.iter().sum::<u64>() <= limit.max(least));
            let most = shares.iter().copied().max().unwrap_or_default();
            for (share, wanted) in shares.iter().zip(&wanted) {
                prop_assert!((1..=*wanted).contains(share));
                // A migration that gets less than another wants no more, but for what does not divide.
                prop_assert!(share == wanted || share + least >= most);
            }
            if wanted.iter().sum::<u64>() >= limit && limit >= least {
                prop_assert!(shares.iter().sum::<u64>() + least > limit, "{shares:?}");
            }
        }
    }
}
