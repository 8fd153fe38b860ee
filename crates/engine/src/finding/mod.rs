//! One thing that is wrong.

pub mod code;
pub mod fix;

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use self::code::{FindingCode, Gravity};
use self::fix::Fix;
use crate::known::if_known;

/// How bad it is; the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A migration would fail or hang.
    Error,
    /// A migration would work, but slower or with less to spare than these hosts could give.
    Warning,
    /// Good to know; nothing needs to be done.
    Remark,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Remark => "remark",
        })
    }
}

/// Where something is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Place {
    /// Name of the host.
    pub host: String,
    /// Name of the interface; absent where the whole host is meant.
    pub link: Option<String>,
    /// Name of the VM; absent where it concerns every VM.
    #[serde(default)]
    pub vm: Option<String>,
}

impl Place {
    /// A whole host.
    pub fn host(host: &str) -> Self {
        Self { host: host.into(), link: None, vm: None }
    }

    /// A link of a host.
    pub fn link(host: &str, link: &str) -> Self {
        Self { link: Some(link.into()), ..Self::host(host) }
    }

    /// A VM on a host, or on its way there.
    pub fn vm(host: &str, vm: &str) -> Self {
        Self { vm: Some(vm.into()), ..Self::host(host) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)?;
        if let Some(link) = &self.link {
            write!(f, " {link}")?;
        }
        self.vm.as_ref().map_or(Ok(()), |vm| write!(f, " VM {vm}"))
    }
}

/// Something that is wrong between two hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Its code, for scripts: the same words in every version.
    pub code: String,
    /// Where it is.
    pub places: Vec<Place>,
    /// What is wrong.
    pub what: String,
    /// What it does to a migration.
    pub effect: String,
    /// What mends it: a command where there is one.
    pub remedy: String,
    /// Whether a migration is refused for it before it begins. Of the other errors a migration may be
    /// spared, as by another path.
    #[serde(default)]
    pub refuses_migration: bool,
    /// What `check --fix` would change on the host at the first place; absent where a person must act.
    #[serde(default, deserialize_with = "if_known")]
    pub fix: Option<Fix>,
}

impl Finding {
    /// As bad as findings of this code get.
    pub(crate) fn new(code: FindingCode, places: impl Into<Vec<Place>>) -> Self {
        let gravity = code.gravity();
        Self {
            severity: gravity.worst(),
            code: code.name().into(),
            places: places.into(),
            what: String::new(),
            effect: String::new(),
            remedy: String::new(),
            refuses_migration: gravity == Gravity::Refusal,
            fix: None,
        }
    }

    /// The milder of the two that findings of this code may be.
    pub(super) fn milder(code: FindingCode, places: impl Into<Vec<Place>>) -> Self {
        let milder = code.gravity().milder();
        debug_assert!(milder.is_some(), "{} has one severity", code.name());
        let finding = Self::new(code, places);
        Self { severity: milder.unwrap_or(finding.severity), ..finding }
    }

    /// Whether it is about this.
    pub fn is(&self, code: FindingCode) -> bool {
        self.code == code.name()
    }

    pub(crate) fn what(mut self, what: impl Into<String>) -> Self {
        self.what = what.into();
        self
    }

    pub(crate) fn effect(mut self, effect: impl Into<String>) -> Self {
        self.effect = effect.into();
        self
    }

    pub(super) fn fix(mut self, fix: Fix) -> Self {
        self.fix = Some(fix);
        self
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

/// Commands that are to be typed on a host, for a [`Finding::remedy`].
pub(crate) fn on(host: &str, command: impl fmt::Display) -> String {
    format!("on {host}: {command}")
}

/// The command that lets in what `matches`, to be followed by [`ANY_FIREWALL`].
pub(super) fn let_in(host: &str, matches: impl fmt::Display) -> String {
    // Behind a rule that drops, an added one would do nothing.
    on(host, format!("nft insert rule inet filter input '{matches} accept'"))
}

/// Not every firewall has the table and the chain that [`let_in`] names.
pub(super) const ANY_FIREWALL: &str = "or the same rule in your firewall's own tool";
