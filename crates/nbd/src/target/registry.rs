//! Which streams may reach the disk, and which wait for others to end.

use tokio::sync::watch;

use crate::error::{Refusal, SplitterError};
use crate::fences::Fences;
use crate::frame::StreamNumber;
use crate::limits::STREAMS_MAX;

#[derive(Debug, Default)]
struct RegistryState {
    fences: Fences,
    /// Why nobody knows what the disk has done.
    failure: Option<SplitterError>,
    is_closing: bool,
}

/// The streams of one disk.
#[derive(Debug, Default)]
pub(super) struct Registry {
    state: watch::Sender<RegistryState>,
}

impl Registry {
    /// Lets a stream begin. It ends by [`Open::has_ended`], or takes all others with it.
    pub(super) fn open(&self, number: StreamNumber) -> Result<Open<'_>, Refusal> {
        let mut opened = Err(Refusal::Disk);
        self.state.send_modify(|state| {
            opened = if state.is_closing || state.failure.is_some() {
                Err(Refusal::Disk)
            } else if state.fences.open_streams() >= 2 * STREAMS_MAX {
                Err(Refusal::TooMany)
            } else if state.fences.open(number) {
                Ok(())
            } else {
                Err(Refusal::Number)
            };
        });
        opened.map(|()| Open { registry: self, number, has_ended: false })
    }

    /// From now on the stream takes nothing more.
    pub(super) fn fence(&self, number: StreamNumber) {
        self.state.send_modify(|state| state.fences.fence(number));
    }

    /// Waits until nothing more of one of these will reach the disk, and returns which one that is.
    pub(super) async fn any_ended(&self, numbers: &[StreamNumber]) -> Result<StreamNumber, SplitterError> {
        let ended =
            |state: &RegistryState| numbers.iter().copied().find(|number| state.fences.has_ended(*number));
        self.until(|state| ended(state).is_some()).await?;
        Ok(ended(&self.state.borrow()).expect("who has ended stays so"))
    }

    pub(super) async fn all_ended(&self) -> Result<(), SplitterError> {
        self.until(|state| state.fences.have_all_ended()).await
    }

    /// Waits until a stream may take nothing more.
    pub(super) async fn shut(&self, number: StreamNumber) -> SplitterError {
        let shut = self.until(|state| state.is_closing || !state.fences.is_open(number)).await;
        shut.err().unwrap_or(SplitterError::Ended)
    }

    /// All streams end, and none comes.
    pub(super) fn close(&self) {
        self.state.send_modify(|state| state.is_closing = true);
    }

    /// The same, and none is ever said to have ended.
    pub(super) fn fail(&self, failure: SplitterError) {
        self.state.send_modify(|state| _ = state.failure.get_or_insert(failure));
    }

    async fn until(&self, is_so: impl Fn(&RegistryState) -> bool) -> Result<(), SplitterError> {
        let mut states = self.state.subscribe();
        let state = states.wait_for(|state| state.failure.is_some() || is_so(state)).await;
        let state = state.expect("the sender is in self");
        state.failure.clone().map_or(Ok(()), Err)
    }
}

/// A stream that may reach the disk.
#[derive(Debug)]
pub(super) struct Open<'registry> {
    registry: &'registry Registry,
    number: StreamNumber,
    has_ended: bool,
}

impl Open<'_> {
    /// The disk has done and flushed all of it.
    pub(super) fn has_ended(mut self) {
        self.has_ended = true;
        let number = self.number;
        self.registry.state.send_modify(|state| state.fences.end(number));
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.registry.fail(SplitterError::Ended);
        }
    }
}
