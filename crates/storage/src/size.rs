//! Sizes of disks as people write them. Pure.

/// From a letter to how often 1024 is multiplied.
const UNITS: &str = "KMGTP";

/// Bytes of "1T", "100GiB", "512M" or "1048576".
pub fn parse(text: &str) -> Result<u64, String> {
    let digits_end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.zip(unit_bytes(unit)).and_then(|(number, unit)| number.checked_mul(unit));
    // A file's size is a signed number to the kernel.
    let bytes = bytes.filter(|bytes| i64::try_from(*bytes).is_ok());
    bytes.ok_or_else(|| "a size, as 500M, 100G or 1T (of 1024 each)".into())
}

fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_uppercase();
    let unit = unit.trim_end_matches("IB");
    let mut letters = unit.chars();
    match (letters.next(), letters.next()) {
        (None, _) => Some(1),
        (Some(letter), None) => Some(1 << (10 * (UNITS.find(letter)? + 1))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("1048576", 1 << 20), ("4K", 4096), ("500m", 500 << 20), ("100GiB", 100 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "1.5G", "-1G", "1X", "1GB", "1GG", "8192P", "99999999999999999999", "1 G", "é"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
