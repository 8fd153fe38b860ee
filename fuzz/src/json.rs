//! Changes to JSON that leave it JSON: of bytes that are changed by chance, hardly any are.

use serde_json::{Map, Number, Value, json};

/// Changes in one go at most.
const CHANGES_MAX: u32 = 4;

/// Copies of an element of a list, or of a text.
const COPIES: [usize; 4] = [1, 2, 40, 300];

/// Values, and bytes of a text, that copies may make.
const COPIED_MAX: usize = 2_000;

/// Numbers at which something ends.
const NUMBERS: [u64; 12] = [
    0,
    1,
    2,
    127,
    255,
    65_535,
    u32::MAX as u64,
    u32::MAX as u64 + 1,
    1 << 44,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];

/// Texts that are something else to somebody.
const TEXTS: [&str; 12] =
    ["", " ", "\u{1b}[2J", "a\nb", "../x", "a,b=c", "-x", "b", "10.0.1.2", "fe80::1/64", "::", "é\u{202e}"];

/// JSON that is a little different, as `seed` has it; none if `data` is none.
pub fn mutate(data: &[u8], seed: u32) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(data).ok()?;
    let mut dice = Dice(u64::from(seed) << 1 | 1);
    for _ in 0..=dice.below(CHANGES_MAX as usize) {
        let donor = nth(&mut value, &mut dice).clone();
        change(nth(&mut value, &mut dice), donor, &mut dice);
    }
    serde_json::to_vec(&value).ok()
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        // Vigna's xorshift64*.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap_or(0) % bound.max(1)
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// One of all values that there are in it.
fn nth<'a>(value: &'a mut Value, dice: &mut Dice) -> &'a mut Value {
    let number = dice.below(count(value));
    find(value, number)
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

fn find(value: &mut Value, number: usize) -> &mut Value {
    if number == 0 {
        return value;
    }
    let mut left = number - 1;
    let inner: Vec<&mut Value> = match value {
        Value::Array(all) => all.iter_mut().collect(),
        Value::Object(all) => all.values_mut().collect(),
        _ => vec![],
    };
    for one in inner {
        let size = count(one);
        if left < size {
            return find(one, left);
        }
        left -= size;
    }
    unreachable!("there are as many as were counted");
}

fn change(value: &mut Value, donor: Value, dice: &mut Dice) {
    match value {
        _ if dice.below(8) == 0 => *value = donor,
        _ if dice.below(16) == 0 => *value = any(dice),
        Value::Number(number) => *value = Value::Number(other_number(number, dice)),
        Value::String(text) => change_text(text, dice),
        Value::Array(all) => change_list(all, donor, dice),
        Value::Object(all) => change_object(all, donor, dice),
        Value::Bool(it_is) => *it_is = !*it_is,
        Value::Null => *value = any(dice),
    }
}

fn any(dice: &mut Dice) -> Value {
    match dice.below(6) {
        0 => Value::Null,
        1 => json!(dice.below(2) == 0),
        2 => json!(dice.one_of(&TEXTS)),
        3 => json!([]),
        4 => json!({}),
        _ => json!(dice.one_of(&NUMBERS)),
    }
}

fn other_number(number: &Number, dice: &mut Dice) -> Number {
    let known = number.as_u64().unwrap_or(0);
    let other = match dice.below(8) {
        0 => known.wrapping_add(1),
        1 => known.wrapping_sub(1),
        2 => known.wrapping_mul(2),
        3 => known / 2,
        4 => dice.below(1 << 16) as u64,
        5 => return Number::from(-1 - i64::try_from(known).unwrap_or(i64::MAX)),
        6 => {
            let small = dice.below(1_000) as f64 - 500.0;
            let float = small * 10_f64.powi(i32::try_from(dice.below(600)).unwrap_or(0) - 300);
            return Number::from_f64(float).unwrap_or_else(|| number.clone());
        }
        _ => dice.one_of(&NUMBERS),
    };
    Number::from(other)
}

fn change_text(text: &mut String, dice: &mut Dice) {
    match dice.below(5) {
        0 => dice.one_of(&TEXTS).clone_into(text),
        1 => text.push_str(dice.one_of(&TEXTS)),
        2 => *text = text.repeat(copies(text.len(), dice)),
        3 => drop(text.pop()),
        _ => {
            let letter = u8::try_from(dice.below(128)).map_or('x', char::from);
            let at = text.char_indices().map(|(at, _)| at).nth(dice.below(text.len())).unwrap_or(0);
            text.insert(at, letter);
        }
    }
}

fn change_list(all: &mut Vec<Value>, donor: Value, dice: &mut Dice) {
    let at = dice.below(all.len());
    match dice.below(4) {
        _ if all.is_empty() => all.push(donor),
        0 => drop(all.remove(at)),
        1 => all.push(donor),
        2 => all.swap(0, at),
        _ => all.extend(vec![all[at].clone(); copies(count(&all[at]), dice)]),
    }
}

/// Of something of this size.
fn copies(size: usize, dice: &mut Dice) -> usize {
    dice.one_of(&COPIES).min(COPIED_MAX / size.max(1))
}

fn change_object(all: &mut Map<String, Value>, donor: Value, dice: &mut Dice) {
    let Some(key) = all.keys().nth(dice.below(all.len())).cloned() else { return };
    match dice.below(3) {
        0 => drop(all.remove(&key)),
        1 => drop(all.insert(key, donor)),
        _ => drop(all.insert(dice.one_of(&TEXTS).into(), donor)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_of_json_is_json_and_something_else() {
        let before = json!({"a": [1, 2.5, {"b": "text"}], "c": null, "d": true}).to_string();
        let after: Vec<Vec<u8>> = (0..500).map(|seed| mutate(before.as_bytes(), seed).unwrap()).collect();
        assert!(after.iter().all(|json| serde_json::from_slice::<Value>(json).is_ok()));
        assert!(after.iter().filter(|json| **json != before.as_bytes()).count() > 400);
        assert_eq!(mutate(b"{", 1), None);
    }
}
