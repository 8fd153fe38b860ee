//! Notifies the service manager, if it asks for that, that the agent answers: it restarts an agent that hangs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_engine::format::duration;
use drainpipe_engine::problem::ProblemKind;
use serde::de::IgnoredAny;
use tokio::time::sleep;
use tracing::warn;

use crate::peers::client::ApiClient;

/// Asks the agent by its own socket, as a user does, four times in each period that the service manager allows.
pub(crate) async fn keep_alive(socket: PathBuf) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let every = limit / 4;
    loop {
        if !answers(&socket, every).await {
            warn!("the agent does not answer its own request within {}", duration(every.as_secs_f64() * 1e3));
        } else if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]) {
            warn!(%error, "cannot notify the service manager that the agent answers");
        }
        sleep(every).await;
    }
}

/// Any answer will do.
async fn answers(socket: &Path, within: Duration) -> bool {
    let Ok(client) = ApiClient::over_socket(socket) else { return false };
    let answer = client.get_within::<IgnoredAny>("/v1/bandwidth", within).await;
    !answer.is_err_and(|problem| problem.kind == ProblemKind::Unreachable)
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn an_agent_that_takes_connections_and_says_nothing_does_not_answer() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(!answers(&socket, Duration::from_millis(50)).await);
    }
}
