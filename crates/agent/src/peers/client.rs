//! Talks to an agent: over its Unix socket, or by mutual TLS. Used by the command line and by agents
//! among themselves.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use drainpipe_engine::format::one_line;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::{Identity, JoinToken, explain, explain_join, join_config};
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Method, RequestBuilder};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a connection may take to stand.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long an answer may take, unless the caller knows better.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(15);

/// How long an answer may take that is passed on: the longest is a guest that powers off.
const PASS_ON_DEADLINE: Duration = Duration::from_secs(90);

/// Longest answer that is read. A result with an hour of samples stays well below.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The longest reason that is repeated in another host's words; honest ones fit on a line.
pub(crate) const WHY_LETTERS_MAX: usize = 256;

/// Text from another host, made safe for a terminal.
pub(crate) fn in_plain_words(why: &str) -> String {
    one_line(why).chars().take(WHY_LETTERS_MAX).collect()
}

/// A way to one agent.
#[derive(Debug, Clone)]
pub struct ApiClient {
    http: Client,
    base: String,
    whom: String,
    explain: Explain,
}

/// Says why a TLS connection failed, if that is what an error is about.
type Explain = fn(&(dyn std::error::Error + 'static)) -> Option<String>;

/// No agent sends anybody elsewhere. A host that did would have the request made of another one, in the name of who
/// asks.
fn client() -> ClientBuilder {
    Client::builder().redirect(Policy::none())
}

impl ApiClient {
    /// Over the Unix socket of an agent on this machine.
    pub fn over_socket(socket: &Path) -> Result<Self, Problem> {
        let http = client()
            .unix_socket(socket)
            .connect_timeout(CONNECT_DEADLINE)
            .tls_backend_preconfigured(no_tls())
            .build()
            .map_err(|error| unbuildable(&error))?;
        Ok(Self {
            http,
            base: "http://localhost".into(),
            whom: format!("the agent at {}", socket.display()),
            explain,
        })
    }

    /// By mutual TLS to the agent of the host `name`, which must hold the certificate of that name.
    pub fn over_tls(name: &str, address: SocketAddr, identity: &Identity) -> Result<Self, Problem> {
        let http = client()
            .tls_backend_preconfigured(identity.client_config())
            .resolve(name, address)
            .https_only(true)
            .no_proxy()
            .connect_timeout(CONNECT_DEADLINE)
            .pool_idle_timeout(Duration::from_mins(1))
            .tcp_nodelay(true)
            .build()
            .map_err(|error| unbuildable(&error))?;
        Ok(Self::of_host(http, name, address, explain))
    }

    /// Without a certificate, to the agent of the host that a token names and whose authority has its fingerprint. That is
    /// known before anything is sent.
    pub(crate) fn to_join(token: &JoinToken, address: SocketAddr) -> Result<Self, Problem> {
        let http = client()
            .tls_backend_preconfigured(join_config(token.authority))
            .resolve(&token.host, address)
            .https_only(true)
            .no_proxy()
            .connect_timeout(CONNECT_DEADLINE)
            .build()
            .map_err(|error| unbuildable(&error))?;
        Ok(Self::of_host(http, &token.host, address, explain_join))
    }

    fn of_host(http: Client, name: &str, address: SocketAddr, explain: Explain) -> Self {
        let base = format!("https://{name}:{}", address.port());
        Self { http, base, whom: format!("the agent of {name} at {address}"), explain }
    }

    /// Asks for a value.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.answer(self.request(Method::GET, path)).await
    }

    /// Asks for a value that may be long in coming.
    pub async fn get_within<T: DeserializeOwned>(
        &self,
        path: &str,
        deadline: Duration,
    ) -> Result<T, Problem> {
        self.answer(self.request(Method::GET, path).timeout(deadline)).await
    }

    /// Asks for a value that [`read`](Self::read) is to read, once it is known as what.
    pub(crate) async fn get_unread(&self, path: &str, deadline: Duration) -> Result<Vec<u8>, Problem> {
        self.successful(self.request(Method::GET, path).timeout(deadline)).await
    }

    /// Reads an answer.
    pub(crate) fn read<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T, Problem> {
        serde_json::from_slice(answer).map_err(|error| self.senseless(&error.to_string()))
    }

    /// Sends a value, gets one.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Problem> {
        self.answer(self.request(Method::POST, path).json(body)).await
    }

    /// Sends a value, gets one that may be long in coming.
    pub async fn post_within<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        deadline: Duration,
    ) -> Result<T, Problem> {
        self.answer(self.request(Method::POST, path).json(body).timeout(deadline)).await
    }

    /// Has something removed, gets what the agent says of it.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.answer(self.request(Method::DELETE, path)).await
    }

    /// Sends a request as it is; for one agent that passes on what was said to it.
    pub async fn pass_on(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<serde_json::Value, Problem> {
        let request = self.request(method, path).timeout(PASS_ON_DEADLINE);
        let request = if body.is_empty() {
            request
        } else {
            request.header(reqwest::header::CONTENT_TYPE, "application/json").body(body)
        };
        self.answer(request).await
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).timeout(ANSWER_DEADLINE)
    }

    async fn answer<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Problem> {
        let body = self.successful(request).await?;
        // `()` is asked for where nothing is to come back, and JSON for it is `null`.
        self.read(if body.is_empty() { b"null" } else { &body })
    }

    async fn successful(&self, request: RequestBuilder) -> Result<Vec<u8>, Problem> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        let body = self.body(response).await?;
        if status.is_success() {
            return Ok(body);
        }
        Err(serde_json::from_slice(&body)
            .unwrap_or_else(|_| self.senseless(&format!("HTTP status {status}"))))
    }

    async fn body(&self, mut response: reqwest::Response) -> Result<Vec<u8>, Problem> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.unreachable(&error))? {
            if body.len() + chunk.len() > ANSWER_BYTES_MAX {
                return Err(self.senseless("its answer is too long"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    fn unreachable(&self, error: &reqwest::Error) -> Problem {
        let explained = (self.explain)(error);
        let is_for_certificates = explained.is_some() && drainpipe_identity::is_for_certificates(error);
        let why = explained.unwrap_or_else(|| {
            if error.is_timeout() {
                return "no answer in time; is the host up, and the port open in its firewall?".into();
            }
            format!("{}; is the agent running (`systemctl status drainpipe`)?", innermost(error))
        });
        let message = format!("{} cannot be reached: {why}", self.whom);
        Problem { is_for_certificates, ..Problem::new(ProblemKind::Unreachable, message) }
    }

    fn senseless(&self, what: &str) -> Problem {
        Problem::failed(format!(
            "{} answers what drainpipe {} does not understand ({}); is one of the two newer? `drainpipe hosts` shows their \
             versions",
            self.whom,
            env!("CARGO_PKG_VERSION"),
            in_plain_words(what)
        ))
    }
}

fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

fn unbuildable(error: &reqwest::Error) -> Problem {
    Problem::failed(format!("cannot prepare an HTTP client: {error}"))
}

/// A Unix socket needs no TLS, and without a preconfigured one the client would load the system's
/// certificates at every start.
fn no_tls() -> rustls::ClientConfig {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has the cipher suites of TLS 1.3")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth()
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    const ELSEWHERE: &[u8] =
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://localhost/v1/drain\r\ncontent-length: 0\r\n\r\n";

    #[tokio::test]
    async fn who_asks_is_sent_nowhere_else() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = [0; 1024];
            assert!(stream.read(&mut asked).await.unwrap() > 0);
            stream.write_all(ELSEWHERE).await.unwrap();
            // Longer than the client listens.
            stream
        });
        let client = ApiClient::over_socket(&socket).unwrap();
        let answered = client.post::<IgnoredAny>("/v1/host", &()).await.unwrap_err();
        assert!(answered.message.contains("307"), "{answered}");
        served.await.unwrap();
    }

    #[test]
    fn a_reason_is_a_short_line() {
        let hostile = format!("\u{1b}[2Jno port\n{}", "x".repeat(10_000));
        let shown = in_plain_words(&hostile);
        assert!(shown.starts_with("[2Jno port x") && shown.len() == WHY_LETTERS_MAX, "{shown}");
    }
}
