//! The files beside a QEMU in the runtime directory, for an agent that has lost its journal: which VM it is, where it
//! came from and where it is going. As long as there is a journal, it decides, and these files are not read.

use std::fs;

use drainpipe_hypervisor::VmDirectory;
use drainpipe_hypervisor::spec::VmSpec;
use serde::{Deserialize, Serialize};
use tracing::warn;

/// What it says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Beside {
    /// As its owner wrote it.
    pub(crate) definition: VmSpec,
    /// The migration by which it came here.
    #[serde(default, rename = "arrival")]
    pub(crate) incoming: Option<RecordedMigration>,
    /// Whether it has run since it came.
    #[serde(default)]
    pub(crate) has_run: bool,
    /// The migration by which it is to leave, until that has failed.
    #[serde(default, rename = "departure")]
    pub(crate) outgoing: Option<RecordedMigration>,
}

/// A migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedMigration {
    /// Its identifier.
    pub(crate) id: String,
    /// The other host.
    pub(crate) host: String,
}

impl Beside {
    /// One that neither came nor is to leave.
    pub(crate) fn of(definition: VmSpec) -> Self {
        Self { definition, incoming: None, has_run: false, outgoing: None }
    }

    /// Whether another host may ask what has become of it here.
    pub(crate) fn concerns_others(&self) -> bool {
        self.outgoing.is_some() || self.incoming.is_some()
    }

    /// It has run here since it came.
    pub(crate) fn note_run(definition: &VmSpec, directory: &VmDirectory) {
        Self { has_run: true, ..Self::read_or(definition, directory) }.write(directory);
    }

    /// It is to leave by this migration; or it stays.
    pub(crate) fn note_outgoing(
        definition: &VmSpec,
        directory: &VmDirectory,
        outgoing: Option<RecordedMigration>,
    ) {
        Self { outgoing, ..Self::read_or(definition, directory) }.write(directory);
    }

    /// It is this from now on.
    pub(crate) fn note_definition(definition: &VmSpec, directory: &VmDirectory) {
        let definition = definition.clone();
        Self { definition: definition.clone(), ..Self::read_or(&definition, directory) }.write(directory);
    }

    fn read_or(definition: &VmSpec, directory: &VmDirectory) -> Self {
        Self::read(directory).unwrap_or_else(|| Self::of(definition.clone()))
    }

    /// In the shape in which it stands there. For a new QEMU, it stands there before QEMU begins: between the two the agent
    /// may end.
    pub(crate) fn as_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts, numbers and lists of them can be written")
    }

    /// Writes it, whole or not at all. What cannot be written is missed only once the journal is lost too.
    pub(crate) fn write(&self, directory: &VmDirectory) {
        let file = directory.record_file();
        let new = file.with_extension("new");
        let written = fs::write(&new, self.as_json()).and_then(|()| fs::rename(&new, &file));
        if let Err(error) = written {
            warn!(vm = %self.definition.name, %error, "what it is does not stand beside its QEMU");
        }
    }

    /// What stands there, if anything can be read.
    pub(crate) fn read(directory: &VmDirectory) -> Option<Self> {
        let text = fs::read(directory.record_file()).ok()?;
        serde_json::from_slice(&text).ok()
    }
}
