use std::path::Path;
use std::time::Duration;

use crate::connection::Connection;
use crate::error::Error;
use crate::events::Subject;
use crate::procedure::{Procedure, remote, urgent};
use crate::xdr::{Decode, Decoder, Malformed};

const OPEN: Procedure = remote(1, "open");
const CLOSE: Procedure = urgent(2, "close");
const SUPPORTS_FEATURE: Procedure = remote(60, "supports feature");
const AUTH_LIST: Procedure = remote(66, "list of ways to authenticate");
const SUBSCRIBE: Procedure = remote(316, "subscribe");

/// Ways to authenticate at most (`REMOTE_AUTH_TYPE_LIST_MAX`).
const WAYS_MAX: usize = 20;
/// Asking for it has the daemon ping us, too.
const KEEP_ALIVE_FEATURE: i32 = 10;

impl Connection {
    /// No call but these is answered before.
    pub(crate) async fn authenticate(&self, socket: &Path, deadline: Duration) -> Result<(), Error> {
        let AuthMethods(methods) = self.call(AUTH_LIST, |_| {}, deadline).await?;
        if methods.contains(&AuthMethod::Nothing) {
            return Ok(());
        }
        let wanted: Vec<String> = methods.iter().map(AuthMethod::name).collect();
        Err(Error::CannotAuthenticate { socket: socket.into(), wanted: wanted.join(" or ") })
    }

    pub(crate) async fn asks_for_keep_alive(&self, deadline: Duration) -> Result<bool, Error> {
        let Truth(supports) = self.call(SUPPORTS_FEATURE, |to| to.i32(KEEP_ALIVE_FEATURE), deadline).await?;
        Ok(supports)
    }

    pub(crate) async fn open_hypervisor(&self, uri: &str, deadline: Duration) -> Result<(), Error> {
        let write = |to: &mut crate::xdr::Encoder| {
            to.optional_text(Some(uri));
            to.u32(0);
        };
        self.call(OPEN, write, deadline).await
    }

    pub(crate) async fn close_hypervisor(&self, deadline: Duration) -> Result<(), Error> {
        self.call(CLOSE, |_| {}, deadline).await
    }

    pub(crate) async fn subscribe_to(&self, subject: Subject, deadline: Duration) -> Result<(), Error> {
        let write = |to: &mut crate::xdr::Encoder| {
            to.i32(subject.number());
            // For all domains.
            to.bool(false);
        };
        let Subscription(_) = self.call(SUBSCRIBE, write, deadline).await?;
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum AuthMethod {
    Nothing,
    Other(i32),
}

impl AuthMethod {
    fn name(&self) -> String {
        match self {
            Self::Nothing => "none".into(),
            Self::Other(1) => "sasl".into(),
            Self::Other(2) => "polkit".into(),
            Self::Other(number) => format!("number {number}"),
        }
    }
}

impl Decode for AuthMethod {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.i32().map(|number| if number == 0 { Self::Nothing } else { Self::Other(number) })
    }
}

pub(super) struct AuthMethods(Vec<AuthMethod>);

impl Decode for AuthMethods {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.list(WAYS_MAX).map(Self)
    }
}

/// Its number, which only unsubscribing needs.
struct Subscription(#[expect(dead_code, reason = "nobody unsubscribes")] i32);

impl Decode for Subscription {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.i32().map(Self)
    }
}

/// A yes or no, as C has it.
pub(super) struct Truth(pub(super) bool);

impl Decode for Truth {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.truth().map(Self)
    }
}
