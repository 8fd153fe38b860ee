//! Numbers as people read them: three significant digits, the unit that fits, no noise.

use std::time::Duration;

/// Shown in place of a number that there is not.
pub const NONE: &str = "–";

/// Bytes of a MiB.
pub const MIB: f64 = (1_u64 << 20) as f64;

/// A time: "0.4 ms", "842 ms", "12.3 s", "2 min 5 s".
pub fn duration(ms: f64) -> String {
    match ms {
        _ if !ms.is_finite() || ms < 0.0 => NONE.to_owned(),
        ..0.05 => "0 ms".to_owned(),
        ..9.95 => format!("{ms:.1} ms"),
        ..999.5 => format!("{ms:.0} ms"),
        ..9_995.0 => format!("{:.2} s", ms / 1e3),
        ..99_950.0 => format!("{:.1} s", ms / 1e3),
        _ => minutes(ms),
    }
}

/// A time that is foreseen, with no more digits than it deserves: "842 ms", "4.8 s", "12 s", "2 min 5 s".
pub fn estimate(ms: f64) -> String {
    match ms {
        _ if !ms.is_finite() || ms < 0.0 => NONE.to_owned(),
        ..999.5 => format!("{ms:.0} ms"),
        ..9_950.0 => format!("{:.1} s", ms / 1e3),
        ..99_500.0 => format!("{:.0} s", ms / 1e3),
        _ => minutes(ms),
    }
}

/// A time that is foreseen, and the most that it may be if that is another: "842 ms", "4.8 s to 12 s".
pub fn estimate_up_to(ms: f64, most_ms: Option<f64>) -> String {
    let least = estimate(ms);
    match most_ms.map(estimate).filter(|most| *most != least) {
        Some(most) => format!("{least} to {most}"),
        None => least,
    }
}

/// A time that users set, or that something took of it, in seconds as they set it: "20 s", "1800 s".
pub fn seconds(ms: f64) -> String {
    if ms.is_finite() && ms >= 0.0 { format!("{:.0} s", ms / 1e3) } else { NONE.to_owned() }
}

/// The longest that is waited for something, as the code has it: "500 ms", "20 s".
pub fn bound(limit: Duration) -> String {
    match limit.subsec_millis() {
        0 if !limit.is_zero() => format!("{} s", limit.as_secs()),
        _ => format!("{} ms", limit.as_millis()),
    }
}

/// A time of a packet there and back, to the microsecond: "0.250 ms".
pub fn round_trip(ms: f64) -> String {
    if ms.is_finite() && ms >= 0.0 { format!("{ms:.3} ms") } else { NONE.to_owned() }
}

fn minutes(ms: f64) -> String {
    let seconds = (ms / 1e3).round();
    format!("{:.0} min {:.0} s", (seconds / 60.0).floor(), seconds % 60.0)
}

/// A rate: "50 Mb/s", "0.95 Gb/s", "1.93 Gb/s", "20.1 Gb/s".
pub fn rate(gbps: f64) -> String {
    if !gbps.is_finite() || gbps < 0.0 {
        return NONE.to_owned();
    }
    match gbps {
        ..0.000_5 => "0 Mb/s".to_owned(),
        ..0.009_95 => format!("{:.1} Mb/s", gbps * 1e3),
        ..0.095 => format!("{:.0} Mb/s", gbps * 1e3),
        _ => format!("{} Gb/s", three_digits(gbps)),
    }
}

/// The speed of a link: "100 Mb/s", "1 Gb/s", "2.5 Gb/s".
pub fn link_speed(speed_mbps: u64) -> String {
    if speed_mbps < 1_000 { mbps(speed_mbps) } else { format!("{} Gb/s", speed_mbps as f64 / 1e3) }
}

/// A rate as users configure it, in whole Mb/s: "2500 Mb/s".
pub fn mbps(mbps: u64) -> String {
    format!("{mbps} Mb/s")
}

/// An amount of memory: "512 KiB", "1.50 GiB".
pub fn bytes(bytes: f64) -> String {
    if !bytes.is_finite() || bytes < 0.0 {
        return NONE.to_owned();
    }
    let mut amount = bytes;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if amount < 999.5 || unit == "TiB" {
            let digits = if unit == "B" { format!("{amount:.0}") } else { three_digits(amount) };
            return format!("{digits} {unit}");
        }
        amount /= 1024.0;
    }
    NONE.to_owned()
}

/// A size to the byte, where two that differ must not read alike: "1073741824 bytes".
pub fn exact_bytes(bytes: u64) -> String {
    format!("{bytes} bytes")
}

/// Memory as specifications have it, in whole MiB: "4096 MiB".
pub fn mib(mib: u64) -> String {
    format!("{mib} MiB")
}

/// Memory that is needed, in MiB as specifications have it, and never too little: beside [`mib_free`], two amounts that
/// differ never read alike where it matters.
pub fn mib_needed(bytes: impl Into<u128>) -> String {
    mib(u64::try_from(bytes.into().div_ceil(1 << 20)).unwrap_or(u64::MAX))
}

/// Memory that is free, in MiB, and never too much.
pub fn mib_free(bytes: u64) -> String {
    mib(bytes >> 20)
}

/// A ratio: "1.96 ×".
pub fn ratio(ratio: f64) -> String {
    if ratio.is_finite() { format!("{} ×", three_digits(ratio)) } else { NONE.to_owned() }
}

/// A part of a whole, 0 to 1: "0.4 %", "49 %".
pub fn percent(part: f64) -> String {
    match part * 100.0 {
        percent if !percent.is_finite() => NONE.to_owned(),
        percent if percent > 0.0 && percent < 9.95 => format!("{percent:.1} %"),
        percent => format!("{percent:.0} %"),
    }
}

/// CPU time: "0.012 s", "1.24 s", "12.4 s".
pub fn cpu_seconds(seconds: f64) -> String {
    match seconds {
        _ if !seconds.is_finite() || seconds < 0.0 => NONE.to_owned(),
        ..0.000_5 => "0 s".to_owned(),
        ..0.099_5 => format!("{seconds:.3} s"),
        _ => format!("{} s", three_digits(seconds)),
    }
}

/// From one number to another, the unit only once where it is the same: "7.29 – 7.48 s".
pub fn range(min: f64, max: f64, show: fn(f64) -> String) -> String {
    let (min, max) = (show(min), show(max));
    match (min.split_once(' '), max.split_once(' ')) {
        (Some((number, unit)), Some((_, other))) if unit == other => format!("{number} – {max}"),
        _ => format!("{min} – {max}"),
    }
}

/// A time of RFC 3339 to the minute: "2026-11-21 01:00 UTC"; any other text as it is.
pub fn date(rfc3339: &str) -> String {
    match (rfc3339.get(..16), rfc3339.ends_with('Z')) {
        (Some(minute), true) if minute.as_bytes()[10] == b'T' => {
            format!("{} UTC", minute.replace('T', " "))
        }
        _ => rfc3339.to_owned(),
    }
}

/// A count with thin spaces between thousands: "1 572 864".
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut grouped = String::with_capacity(digits.len() * 2);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push('\u{202f}');
        }
        grouped.push(digit);
    }
    grouped
}

/// "1 run", "3 runs".
pub fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A number of VMs: "1 VM", "3 VMs".
pub fn vms(count: usize) -> String {
    plural(count, "VM", "VMs")
}

/// Text of others without what would act on a terminal. Its lines stay.
pub fn plain(text: &str) -> String {
    text.chars().filter(|character| !character.is_control() || *character == '\n').collect()
}

/// Text of others without what would act on a terminal or break a line.
pub fn one_line(text: &str) -> String {
    plain(&text.replace(['\n', '\t'], " "))
}

/// At most three significant digits and at most two decimals.
fn three_digits(number: f64) -> String {
    match number.abs() {
        ..9.995 => format!("{number:.2}"),
        ..99.95 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_fits() {
        for (ms, text) in [
            (0.0, "0 ms"),
            (0.44, "0.4 ms"),
            (9.96, "10 ms"),
            (999.4, "999 ms"),
            (999.6, "1.00 s"),
            (9_994.0, "9.99 s"),
            (13_640.0, "13.6 s"),
            (125_400.0, "2 min 5 s"),
            (119_700.0, "2 min 0 s"),
            (f64::NAN, NONE),
            (-1.0, NONE),
        ] {
            assert_eq!(duration(ms), text, "{ms}");
        }
    }

    #[test]
    fn what_is_foreseen_has_two_digits() {
        for (ms, text) in [
            (0.44, "0 ms"),
            (4_800.0, "4.8 s"),
            (9_960.0, "10 s"),
            (99_400.0, "99 s"),
            (99_600.0, "1 min 40 s"),
            (125_400.0, "2 min 5 s"),
            (f64::NAN, NONE),
            (-1.0, NONE),
        ] {
            assert_eq!(estimate(ms), text, "{ms}");
        }
        assert_eq!(estimate_up_to(12_000.0, None), "12 s");
        assert_eq!(estimate_up_to(12_000.0, Some(125_000.0)), "12 s to 2 min 5 s");
        assert_eq!(estimate_up_to(12_000.0, Some(12_010.0)), "12 s");
    }

    #[test]
    fn rates_have_the_unit_that_fits() {
        for (gbps, text) in [
            (0.0, "0 Mb/s"),
            (0.005, "5.0 Mb/s"),
            (0.05, "50 Mb/s"),
            (0.957, "0.96 Gb/s"),
            (1.934, "1.93 Gb/s"),
            (20.06, "20.1 Gb/s"),
            (f64::INFINITY, NONE),
        ] {
            assert_eq!(rate(gbps), text, "{gbps}");
        }
        assert_eq!(link_speed(100), "100 Mb/s");
        assert_eq!(link_speed(2_500), "2.5 Gb/s");
        assert_eq!(link_speed(10_000), "10 Gb/s");
        assert_eq!(mbps(10_000), "10000 Mb/s");
    }

    #[test]
    fn cpu_time_keeps_small_values() {
        for (seconds, text) in [(0.0, "0 s"), (0.0121, "0.012 s"), (1.237, "1.24 s"), (-1.0, NONE)] {
            assert_eq!(cpu_seconds(seconds), text);
        }
    }

    #[test]
    fn bounds_are_as_the_code_has_them() {
        for (ms, text) in [(0, "0 ms"), (500, "500 ms"), (1_500, "1500 ms"), (20_000, "20 s")] {
            assert_eq!(bound(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn amounts_are_binary() {
        for (amount, text) in [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (1024.0, "1.00 KiB"),
            (1.5 * 1024.0 * 1024.0 * 1024.0, "1.50 GiB"),
            (4e15, "3638 TiB"),
        ] {
            assert_eq!(bytes(amount), text);
        }
    }

    #[test]
    fn what_is_needed_is_more_than_what_is_free_also_by_a_byte() {
        let bytes = 4_096 << 20;
        assert_eq!([mib_needed(bytes), mib_free(bytes)], ["4096 MiB", "4096 MiB"]);
        assert_eq!([mib_needed(bytes + 1), mib_free(bytes)], ["4097 MiB", "4096 MiB"]);
        assert_eq!([mib_needed(bytes), mib_free(bytes - 1)], ["4096 MiB", "4095 MiB"]);
    }

    #[test]
    fn what_users_set_is_said_as_they_set_it() {
        for (ms, text) in [(20_000.0, "20 s"), (1_800_000.0, "1800 s"), (f64::NAN, NONE), (-1.0, NONE)] {
            assert_eq!(seconds(ms), text, "{ms}");
        }
        assert_eq!(round_trip(0.25), "0.250 ms");
    }

    #[test]
    fn ranges_name_their_unit_once() {
        assert_eq!(range(7_290.0, 7_480.0, duration), "7.29 – 7.48 s");
        assert_eq!(range(950.0, 1_050.0, duration), "950 ms – 1.05 s");
        assert_eq!(range(59_000.0, 125_000.0, duration), "59.0 s – 2 min 5 s");
    }

    #[test]
    fn dates_are_shown_to_the_minute() {
        assert_eq!(date("2026-11-21T01:02:03.4Z"), "2026-11-21 01:02 UTC");
        for other in ["", "yesterday", "2026-11-21T01:02:03+01:00", "éééééééééééééZ"] {
            assert_eq!(date(other), other);
        }
    }

    #[test]
    fn counts_are_grouped() {
        assert_eq!(count(7), "7");
        assert_eq!(count(1_572_864), "1\u{202f}572\u{202f}864");
        assert_eq!(count(100_000), "100\u{202f}000");
    }

    #[test]
    fn what_would_act_on_a_terminal_is_gone() {
        assert_eq!(one_line("a\x1b[2J\u{9b}b\r\nc\td"), "a[2Jb c d");
        assert_eq!(plain("a\x1b[2J\u{9b}b\r\nc"), "a[2Jb\nc");
    }
}
