//! Unpacks what came packed.

use drainpipe_relay::BundleUnpacker;
use tokio::task::spawn_blocking;

use crate::buffers::Buffer;
use crate::error::SplitterError;

/// Unpacks the data of one stream. It holds no memory until something comes packed.
#[derive(Debug, Default)]
pub(super) struct Unpacking(Option<BundleUnpacker>);

impl Unpacking {
    /// Fills all of `raw`. It takes a core for a millisecond or so, which other streams must not wait for.
    pub(super) async fn unpack(&mut self, packed: Buffer, mut raw: Buffer) -> Result<Buffer, SplitterError> {
        let mut tool = match self.0.take() {
            Some(tool) => tool,
            None => BundleUnpacker::new().map_err(SplitterError::Unpack)?,
        };
        let unpacking = spawn_blocking(move || {
            let filled = tool.unpack(&packed, &mut raw);
            (tool, filled.map(|()| raw))
        });
        let (tool, filled) = match unpacking.await {
            Ok(ended) => ended,
            // With the runtime.
            Err(error) if error.is_cancelled() => return Err(SplitterError::Ended),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.0 = Some(tool);
        filled.map_err(SplitterError::Unpack)
    }
}
