//! Texts of VMs in a form that can be shown on a terminal: anybody may have written them.

/// Longer ones are cut.
const LENGTH_MAX: usize = 200;

/// On one line, with everything escaped that a terminal would obey.
pub fn plain(text: &str) -> String {
    if text.is_empty() {
        return "without a name".to_owned();
    }
    text.chars().take(LENGTH_MAX).flat_map(escape).collect()
}

/// A message that has such texts in it, whole.
pub fn line(message: &str) -> String {
    message.chars().take(8 * LENGTH_MAX).flat_map(escape).collect()
}

fn escape(character: char) -> impl Iterator<Item = char> {
    let is_harmless = matches!(character, '\'' | '"' | '\\');
    let as_it_is = is_harmless.then_some(character);
    let escaped = (!is_harmless).then(|| character.escape_debug());
    as_it_is.into_iter().chain(escaped.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_obey_nothing_of_it() {
        assert_eq!(plain("it's \"Ü\"\\"), "it's \"Ü\"\\");
        assert_eq!(plain("a\u{1b}[2J\n\u{202e}\u{85}"), "a\\u{1b}[2J\\n\\u{202e}\\u{85}");
        assert_eq!(plain(&"a".repeat(300)).len(), LENGTH_MAX);
    }
}
