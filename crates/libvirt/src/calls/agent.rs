use std::time::Duration;

use crate::connection::Connection;
use crate::domain::Domain;
use crate::error::Error;
use crate::procedure::{Procedure, qemu};
use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

const AGENT_COMMAND: Procedure = qemu(3, "command to the guest's agent");

impl Connection {
    /// Has the guest's agent carry out a command, both in JSON; the daemon waits for it for `deadline`, in whole seconds.
    pub async fn agent_command(
        &self,
        domain: &Domain,
        command: &str,
        deadline: Duration,
    ) -> Result<Option<String>, Error> {
        // 0 would be to ask without waiting, and below it something else.
        let seconds = i32::try_from(deadline.as_secs()).unwrap_or(i32::MAX).max(1);
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.text(command);
            to.i32(seconds);
            to.u32(0);
        };
        let OptionalText(answer) = self.call(AGENT_COMMAND, write, deadline).await?;
        Ok(answer)
    }
}

pub(super) struct OptionalText(Option<String>);

impl Decode for OptionalText {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.optional(Decoder::text).map(Self)
    }
}
