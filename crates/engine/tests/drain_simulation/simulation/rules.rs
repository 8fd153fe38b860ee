//! The rules that every run must keep, after each of its steps and at its end.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::drain::run::{DrainAction, DrainEvent};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};

use super::{Answer, Course, Simulation};
use crate::faults::Sight;
use crate::planted::Planted;
use crate::world::{At, Flight, Vm};

/// The most copies of disks between the same two devices.
const COPIES_MAX: usize = 4;

/// How long the drain copies one disk at a time, until it has measured something.
const ONE_COPY_MS: f64 = 5_000.0;

impl Simulation {
    /// Checks that the drain may want this now.
    pub(super) fn check_given(&mut self, action: &DrainAction) -> Result<(), String> {
        if self.course != Course::UnderWay {
            return Err(format!("{action:?} after it was over"));
        }
        match action {
            DrainAction::Begin { .. } | DrainAction::Release { .. } if self.is_closing() => {
                Err(format!("{action:?} while nothing may be"))
            }
            DrainAction::Begin { vm, .. } if self.answer.is_some() => {
                Err(format!("{vm} is begun while nothing may be"))
            }
            DrainAction::Begin { vm, .. } => self.check_begin(vm),
            DrainAction::Release { vm } => self.check_turn(vm),
            DrainAction::GiveWay { vm } => self.give_way(vm),
            DrainAction::TakeAll { vm } if self.giving_way.remove(vm) => Ok(()),
            DrainAction::TakeAll { vm } => Err(format!("{vm} did not give way")),
            DrainAction::Cancel { vm } => self.take_back(vm),
            DrainAction::Plan if self.answer.is_some() => Err("two plans are made at once".into()),
            DrainAction::Plan => {
                self.answer = Some(Answer::Awaited);
                if self.planted != Planted::StalePlan {
                    self.answer_again = None;
                }
                Ok(())
            }
            DrainAction::Finish => self.check_finish(),
        }
    }

    pub(super) fn check_begin(&mut self, vm: &str) -> Result<(), String> {
        if self.left.contains(vm) {
            return Err(format!("{vm} is begun, and somebody else has moved it"));
        }
        let under_way = self.world.vms.iter().filter(|vm| vm.flight.is_some()).count();
        let wanted =
            self.pending.iter().filter(|pending| matches!(pending.action, DrainAction::Begin { .. })).count();
        let leaving = 1 + under_way + wanted + usize::from(self.others);
        let is_reported = !self.own_news.iter().any(|news| matches!(news, DrainEvent::OthersLeave { .. }));
        if is_reported && leaving > usize::from(self.limits.outbound) {
            return Err(format!("{vm} is begun while as many leave as may"));
        }
        if self.others > 0 && leaving == usize::from(self.limits.outbound) {
            self.world.saw(Sight::OutboundByOthers);
        }
        Ok(())
    }

    /// A VM that has sent more than it should must not keep one waiting that has not.
    pub(super) fn check_turn(&self, vm: &str) -> Result<(), String> {
        let vm = &self.world.vms[self.index(vm)?];
        let status = self.drain.status(self.clock_ms());
        let waits =
            |row: &&MoveStatus| row.state == MoveState::Ready && row.attempts == 1 && row.error.is_none();
        match status.moves.iter().find(waits).filter(|_| vm.gave_way) {
            Some(row) => Err(format!("{} goes before {}, and does not converge", vm.name, row.vm)),
            None => Ok(()),
        }
    }

    /// One VM more may be on the links while another is about to be paused.
    pub(super) fn check_links(&self, most: u8) -> Result<(), String> {
        // Memory that follows a disk has no turn of its own.
        let on_links = self.world.vms.iter().filter(|vm| !vm.is_copied());
        let on_links = on_links.filter(|vm| vm.flight.is_some_and(|flight| flight.is_on_links()));
        let on_links: Vec<bool> = on_links.map(Vm::is_ending).collect();
        let (all, ending) = (on_links.len(), on_links.iter().filter(|is_ending| **is_ending).count());
        let most = usize::from(most);
        if all - ending > most || all > most.saturating_add(1) {
            return Err(format!("too many on the links: {all}, of which {ending} near their end"));
        }
        Ok(())
    }

    /// Between each pair of devices, one disk is copied at first, and never more than the devices bear.
    fn check_copies(&self) -> Result<(), String> {
        let mut pairs = BTreeMap::<_, usize>::new();
        for pair in self.world.vms.iter().filter_map(Vm::device_pair) {
            *pairs.entry(pair).or_default() += 1;
        }
        let most = if self.now_ms - self.begun_ms < ONE_COPY_MS { 1 } else { COPIES_MAX };
        match pairs.into_iter().find(|(_, count)| *count > most) {
            Some((pair, count)) => Err(format!("{count} copies at a time in {pair:?}")),
            None => Ok(()),
        }
    }

    pub(super) fn check_finish(&mut self) -> Result<(), String> {
        if self.answer.is_some() || self.world.vms.iter().any(|vm| vm.flight.is_some()) {
            return Err("it is over while something is under way".into());
        }
        if let Some(vm) = self.giving_way.first() {
            return Err(format!("it is over, and {vm} gives way"));
        }
        self.course = Course::Over;
        Ok(())
    }

    /// Checks what holds at any time.
    pub(super) fn check(&self) -> Result<(), String> {
        let flights: Vec<Flight> = self.world.vms.iter().filter_map(|vm| vm.flight).collect();
        if flights.len() > usize::from(self.limits.outbound) {
            return Err("too many leave this host".into());
        }
        let most = self.limits.transfers.unwrap_or(u8::MAX);
        self.check_links(most)?;
        self.check_copies()?;
        for host in 0..self.world.hosts.len() {
            let inbound = flights.iter().filter(|flight| flight.target == host).count();
            if inbound > usize::from(self.limits.inbound) {
                return Err(format!("too many on their way to {}", self.world.hosts[host].name));
            }
            if self.world.is_overcommitted(host) {
                return Err(format!("overcommit of {}", self.world.hosts[host].name));
            }
            self.check_groups(host)?;
        }
        Ok(())
    }

    /// The reports meanwhile are true, too: what they say of a VM under way is what was heard last.
    pub(super) fn check_rows(&self, status: &DrainStatus) -> Result<(), String> {
        for row in &status.moves {
            let vm = &self.world.vms[self.index(&row.vm)?];
            let is_so = match row.state {
                MoveState::Left => vm.at == At::Elsewhere,
                _ if self.left.contains(&row.vm) => false,
                MoveState::Moved => vm.has_moved(),
                MoveState::Failed | MoveState::Waiting => !vm.has_moved() && vm.flight.is_none(),
                MoveState::InDoubt => vm.flight.is_none(),
                _ => vm.begun > 0 || !self.pending.is_empty(),
            };
            if !is_so {
                return Err(format!("{} is {:?}, by its row {row:?}", vm.name, vm.at));
            }
        }
        Ok(())
    }

    fn check_groups(&self, host: usize) -> Result<(), String> {
        let mut groups: BTreeSet<&String> =
            self.world.hosts[host].vms.iter().flat_map(|vm| &vm.placement.apart).collect();
        let coming = self.world.inhabitants(host).flat_map(|vm| &vm.placement.apart);
        for group in coming {
            if !groups.insert(group) {
                return Err(format!("two of group {group} on {}", self.world.hosts[host].name));
            }
        }
        Ok(())
    }

    /// A restarted agent knows what its earlier lives have moved, or may have moved.
    pub(super) fn check_known(&self) -> Result<(), String> {
        let known = self.journal.settled(&self.world, self.planted);
        for vm in self.world.vms.iter().filter(|vm| vm.was_begun()) {
            let row = known.iter().find(|row| row.vm == vm.name).map(|row| row.state);
            let is_known = match vm.at {
                At::InDoubt(_) => row == Some(MoveState::InDoubt),
                At::Elsewhere => row == Some(MoveState::Left),
                _ if vm.has_moved() => row == Some(MoveState::Moved),
                _ => !matches!(row, Some(MoveState::Moved | MoveState::InDoubt)),
            };
            if !is_known {
                return Err(format!("{} is {:?}, and the journal does not know: {row:?}", vm.name, vm.at));
            }
        }
        Ok(())
    }

    /// The report at the end is true.
    pub(super) fn check_end(&self) -> Result<(), String> {
        let outcome = self.drain.outcome().ok_or("it is over, and has no outcome")?;
        let is_here = |vm: &Vm| matches!(vm.at, At::Here | At::InDoubt(_));
        let here = self.world.vms.iter().any(is_here);
        let gone = self.world.vms.iter().any(|vm| vm.at == At::EndedHere);
        let is_drained =
            outcome == DrainState::Drained || outcome == DrainState::Incomplete && self.all_moved();
        // A drain that was cancelled while its last VMs were in doubt counts as cancelled, even if they have moved.
        let may_be_empty = is_drained || gone || outcome == DrainState::Cancelled;
        if is_drained && here || !here && !may_be_empty {
            return Err(format!("{outcome:?}, and VMs are here: {here}"));
        }
        self.check_attempts()?;
        self.check_known()?;
        self.check_report()
    }

    /// Whether all VMs have moved, by what has become known since the end, too.
    fn all_moved(&self) -> bool {
        let moves = self.journal.settled(&self.world, self.planted);
        let mut status = self.status();
        status.stays.retain(|stay| moves.iter().all(|one| one.vm != stay.vm));
        DrainStatus { moves, ..status }.all_moved()
    }

    fn check_attempts(&self) -> Result<(), String> {
        for row in self.drain.status(self.clock_ms()).moves {
            let vm = &self.world.vms[self.index(&row.vm)?];
            if vm.begun != u64::from(row.attempts) {
                return Err(format!("{} was begun {} times, by its row {row:?}", vm.name, vm.begun));
            }
        }
        Ok(())
    }

    /// The report names each VM once, and what it says is true.
    fn check_report(&self) -> Result<(), String> {
        let status = self.status();
        let names = status.moves.iter().map(|row| &row.vm).chain(status.stays.iter().map(|stay| &stay.vm));
        let mut listed = BTreeSet::new();
        for name in names {
            if !listed.insert(name) {
                return Err(format!("{name} is told of twice"));
            }
        }
        let is_mine = |vm: &&Vm| match vm.at {
            At::Here => true,
            At::EndedHere => false,
            At::Elsewhere | At::Target(_) | At::InDoubt(_) | At::EndedThere => vm.was_begun(),
        };
        let mut mine = self.world.vms.iter().filter(is_mine).map(|vm| &vm.name);
        if let Some(lost) = mine.find(|name| !listed.contains(name)) {
            return Err(format!("{lost} is not in the report"));
        }
        for row in self.journal.settled(&self.world, self.planted) {
            let at = self.world.vms[self.index(&row.vm)?].at;
            let is_so = match row.state {
                MoveState::Moved => matches!(at, At::Target(_) | At::EndedThere),
                MoveState::Failed => matches!(at, At::Here | At::EndedHere) && row.error.is_some(),
                MoveState::InDoubt => matches!(at, At::InDoubt(_)),
                MoveState::Left => at == At::Elsewhere,
                _ => false,
            };
            if !is_so {
                return Err(format!("{} is {at:?}, by its row {row:?}", row.vm));
            }
        }
        Ok(())
    }
}

/// Whatever the clock does, the figures make sense.
pub(super) fn check_numbers(status: &DrainStatus) -> Result<(), String> {
    let most_ms = status.predicted_most_ms.unwrap_or(status.predicted_ms);
    let eta_ms = status.eta_ms.unwrap_or(0.0);
    let numbers = [status.rate_mbps, status.elapsed_ms, status.predicted_ms, most_ms, eta_ms];
    if numbers.iter().all(|number| number.is_finite() && *number >= 0.0) && status.transfers > 0 {
        return Ok(());
    }
    Err(format!("a number makes no sense: {status:?}"))
}
