//! Tokens that let a host join, by their hashes alone: who reads the journal cannot join by it.

use rusqlite::{Connection, params};

use super::{Journal, JournalCause, JournalError};

/// What became of a token that somebody has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is used up now, by who has shown it.
    Taken,
    /// There is none, or it was used by somebody else, or has ended. Who shows it is not told which.
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
    pub(crate) fn look_at_token(&self, hash: &str, user: &str, now_s: i64) -> Result<Taken, JournalError> {
        self.run(|connection| {
            Ok(find_open(connection, hash, user, now_s)?.map_or(Taken::Refused, |_| Taken::Taken))
        })
    }

    /// Whether this user has used the token up.
    pub(crate) fn has_used_token(&self, hash: &str, user: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let query = "SELECT count(*) FROM join_tokens WHERE hash = ?1 AND used_by = ?2";
            Ok(connection.query_row(query, [hash, user], |row| row.get::<_, u32>(0))? > 0)
        })
    }

    /// Uses a token up, for `user`. Who has lost the answer may show it again.
    pub(crate) fn take_token(&self, hash: &str, user: &str, now_s: i64) -> Result<Taken, JournalError> {
        self.run(|connection| {
            let Some(found) = find_open(connection, hash, user, now_s)? else { return Ok(Taken::Refused) };
            connection
                .execute("UPDATE join_tokens SET used_by = ?2 WHERE hash = ?1", params![found, user])?;
            Ok(Taken::Taken)
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

/// The token, if it is good for this user. All are compared, each as long as any other.
fn find_open(
    connection: &Connection,
    hash: &str,
    user: &str,
    now_s: i64,
) -> Result<Option<String>, JournalCause> {
    let mut found = None;
    for (known, used_by) in open_tokens(connection, now_s)? {
        if is_equal(known.as_bytes(), hash.as_bytes()) && used_by.is_none_or(|used_by| used_by == user) {
            found = Some(known);
        }
    }
    Ok(found)
}

fn open_tokens(connection: &Connection, now_s: i64) -> Result<Vec<(String, Option<String>)>, JournalCause> {
    let mut statement = connection.prepare("SELECT hash, used_by FROM join_tokens WHERE ends_at_s > ?1")?;
    let rows = statement.query_map([now_s], |row| Ok((row.get(0)?, row.get(1)?)))?;
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
        assert_eq!(take("abd", "b", 1), Taken::Refused);
        assert_eq!(take("abc", "b", 100), Taken::Refused);
        assert_eq!(open().last_token_ends_at_s().unwrap(), Some(100));
        assert_eq!(take("abc", "b", 99), Taken::Taken);
        assert_eq!(take("abc", "b", 99), Taken::Taken);
        assert_eq!(take("abc", "c", 99), Taken::Refused);
        assert_eq!(open().last_token_ends_at_s().unwrap(), None);
    }
}
