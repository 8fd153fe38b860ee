//! `drainpipe pki …`.

use std::num::NonZeroU32;

use drainpipe_engine::problem::Problem;
use drainpipe_identity::authority::{self, InitOptions, IssueOptions, Issued};

use crate::arguments::{PkiCommand, PkiPlace};
use crate::exit::Exit;
use crate::output;

pub(crate) fn run(command: &PkiCommand) -> Result<Exit, Problem> {
    match command {
        PkiCommand::Init { place } => {
            let options = InitOptions { overwrite: place.force, ..InitOptions::default() };
            let certificate = authority::init(&place.directory, &options).map_err(Problem::refused)?;
            output::print(&format!(
                "made the authority {}\nits key beside it can make any host's certificate: keep it off the hosts\n",
                certificate.display()
            ))?;
        }
        PkiCommand::Host { name, place, days } => {
            let issued = authority::issue_host(&place.directory, name, &options(place, *days));
            tell(&issued.map_err(Problem::refused)?, "/etc/drainpipe/ on that host")?;
        }
        PkiCommand::Operator { name, place, days } => {
            let issued = authority::issue_operator(&place.directory, name, &options(place, *days));
            tell(&issued.map_err(Problem::refused)?, "/etc/drainpipe/operator/ where that person works")?;
        }
    }
    Ok(Exit::Done)
}

fn options(place: &PkiPlace, days: NonZeroU32) -> IssueOptions {
    IssueOptions { overwrite: place.force, ..IssueOptions::valid_days(days) }
}

fn tell(issued: &Issued, destination: &str) -> Result<(), Problem> {
    output::print(&format!(
        "made, valid until {}:\n  {}\n  {}\n  {}\ncopy them to {destination}\n",
        issued.not_after,
        issued.certificate.display(),
        issued.key.display(),
        issued.authority.display(),
    ))
}
