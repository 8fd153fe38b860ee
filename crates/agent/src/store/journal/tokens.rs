//! Tokens that let a host join, stored only as hashes: a reader of the journal cannot join with them.

use rusqlite::{Connection, params};

use super::{Journal, JournalCause, JournalError};

/// How long who has used a token up may ask again: the answer may have been lost.
pub(crate) const AGAIN_WITHIN_S: i64 = 60;

/// What became of a token that somebody has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenUse {
    /// It is used up now, by who has shown it.
    First,
    /// It was used up by who has shown it, just now: the answer may have been lost.
    Again,
    /// There is none, or it was used by somebody else or longer ago, or has ended. The caller does not learn which.
    Refused,
}

impl Journal {
    /// Records a token, and forgets those that ended before `now_s`.
    pub(crate) fn add_token(&self, hash: &str, now_s: i64, ends_at_s: i64) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            transaction.execute("DELETE FROM join_tokens WHERE ends_at_s <= ?1", [now_s])?;
            transaction.execute(
                "INSERT INTO join_tokens (hash, ends_at_s) VALUES (?1, ?2)",
                params![hash, ends_at_s],
            )?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// What would become of a token.
    pub(crate) fn look_at_token(&self, hash: &str, user: &str, now_s: i64) -> Result<TokenUse, JournalError> {
        self.run(|connection| {
            Ok(find_open(connection, hash, user, now_s)?.map_or(TokenUse::Refused, |(_, taken)| taken))
        })
    }

    /// Uses a token up, for `user`. A host that has lost the answer may show it again within a minute.
    pub(crate) fn take_token(&self, hash: &str, user: &str, now_s: i64) -> Result<TokenUse, JournalError> {
        self.run(|connection| {
            let Some((found, taken)) = find_open(connection, hash, user, now_s)? else {
                return Ok(TokenUse::Refused);
            };
            if taken == TokenUse::First {
                let update = "UPDATE join_tokens SET used_by = ?2, used_at_s = ?3 WHERE hash = ?1";
                connection.execute(update, params![found, user, now_s])?;
            }
            Ok(taken)
        })
    }

    /// Tokens that a host of this name has used let it in no more: it has left, or was revoked.
    pub(crate) fn forget_tokens_of(&self, host: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            let used = "DELETE FROM join_tokens WHERE substr(used_by, 1, length(?1) + 1) = ?1 || ' '";
            connection.execute(used, [host])?;
            Ok(())
        })
    }

    /// When the last token ends that nobody has used.
    pub(crate) fn last_token_ends_at_s(&self) -> Result<Option<i64>, JournalError> {
        self.run(|connection| {
            let query = "SELECT max(ends_at_s) FROM join_tokens WHERE used_by IS NULL";
            Ok(connection.query_row(query, [], |row| row.get(0))?)
        })
    }
}

/// The token, if it is good for this user, and what would become of it. All are compared, each as long as any other.
fn find_open(
    connection: &Connection,
    hash: &str,
    user: &str,
    now_s: i64,
) -> Result<Option<(String, TokenUse)>, JournalCause> {
    let mut found = None;
    for token in open_tokens(connection, now_s)? {
        if is_equal(token.hash.as_bytes(), hash.as_bytes()) {
            found = token.shown_by(user, now_s).map(|taken| (token.hash, taken));
        }
    }
    Ok(found)
}

struct Token {
    hash: String,
    used_by: Option<String>,
    used_at_s: Option<i64>,
}

impl Token {
    fn shown_by(&self, user: &str, now_s: i64) -> Option<TokenUse> {
        let Some(used_by) = &self.used_by else { return Some(TokenUse::First) };
        let is_just_now = self.used_at_s.is_some_and(|at| (at..at + AGAIN_WITHIN_S).contains(&now_s));
        (used_by == user && is_just_now).then_some(TokenUse::Again)
    }
}

fn open_tokens(connection: &Connection, now_s: i64) -> Result<Vec<Token>, JournalCause> {
    let query = "SELECT hash, used_by, used_at_s FROM join_tokens WHERE ends_at_s > ?1";
    let mut statement = connection.prepare(query)?;
    let rows = statement.query_map([now_s], |row| {
        Ok(Token { hash: row.get(0)?, used_by: row.get(1)?, used_at_s: row.get(2)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Takes as long for any two of one length.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (one, other)| all | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_token_is_good_once_and_until_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Journal::open(directory.path(), directory.path()).unwrap();
        open().add_token("abc", 0, 100).unwrap();
        let take = |hash: &str, user: &str, now_s| open().take_token(hash, user, now_s).unwrap();
        assert_eq!(take("abd", "b", 1), TokenUse::Refused);
        assert_eq!(take("abc", "b", 100), TokenUse::Refused);
        assert_eq!(open().last_token_ends_at_s().unwrap(), Some(100));
        assert_eq!(take("abc", "b", 99), TokenUse::First);
        assert_eq!(take("abc", "b", 99), TokenUse::Again);
        assert_eq!(take("abc", "c", 99), TokenUse::Refused);
        assert_eq!(open().last_token_ends_at_s().unwrap(), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_used_token_is_shown_again_for_a_minute_and_never_after_a_revocation() {
        let (_directory, journal) = Journal::temporary();
        journal.add_token("abc", 0, 1000).unwrap();
        assert_eq!(journal.take_token("abc", "b key", 10).unwrap(), TokenUse::First);
        assert_eq!(journal.take_token("abc", "b key", 69).unwrap(), TokenUse::Again);
        // The first use counts, not the last.
        assert_eq!(journal.take_token("abc", "b key", 70).unwrap(), TokenUse::Refused);
        journal.add_token("def", 0, 1000).unwrap();
        assert_eq!(journal.take_token("def", "c key", 10).unwrap(), TokenUse::First);
        journal.forget_tokens_of("b").unwrap();
        assert_eq!(journal.look_at_token("def", "c key", 11).unwrap(), TokenUse::Again);
        journal.forget_tokens_of("c").unwrap();
        assert_eq!(journal.look_at_token("def", "c key", 11).unwrap(), TokenUse::Refused);
    }
}
