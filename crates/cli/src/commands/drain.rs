//! `drainpipe drain` and `drainpipe resume`.

use std::fmt::Write;

use drainpipe_api_types::{
    DrainKind, DrainPlanView, DrainRequest, DrainView, PLAN_DEADLINE, ResumeRequest, plan_warnings,
};
use drainpipe_engine::drain::plan::{DrainPlan, Move};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveStatus};
use drainpipe_engine::drain::stay::Stay;
use drainpipe_engine::format;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;

use super::migrate::tell_finding;
use crate::arguments::{DrainArguments, DrainCommand, ResumeArguments};
use crate::connection::{ConnectionArguments, Fleet, Host};
use crate::exit::Exit;
use crate::follow::{self, Followed};
use crate::{ask, output};

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &DrainArguments,
    json: bool,
) -> Result<Exit, Problem> {
    match &arguments.command {
        Some(DrainCommand::Status { host }) => status(&connection.fleet()?, host.as_deref(), json).await,
        Some(DrainCommand::Cancel { host }) => cancel(&connection.fleet()?, host.as_deref(), json).await,
        None => drain(connection, arguments, json).await,
    }
}

async fn drain(
    connection: &ConnectionArguments,
    arguments: &DrainArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let asks = !arguments.yes && !arguments.dry_run;
    if asks {
        ask::is_possible("`drain`")?;
    }
    let host = named(&connection.fleet()?, arguments.host.as_deref()).await?;
    let request = DrainRequest {
        to: arguments.to.clone(),
        swap_with: arguments.swap.clone(),
        deadline_s: arguments.deadline,
        option: arguments.option,
        transfers: arguments.transfers,
        throttle_max_percent: arguments.throttle,
        encrypt: arguments.encrypt,
        post_copy: arguments.post_copy,
        copy_storage: arguments.copy_storage,
        disks_first: arguments.disks_first,
    };
    if arguments.dry_run {
        return dry_run(&host, &request, json).await;
    }
    if asks && !agreed(&host, &request).await? {
        output::remark("nothing is changed");
        return Ok(Exit::Cancelled);
    }
    // A user who was asked has seen them, and JSON has them.
    let warns = !asks && !json;
    let begun = |view: &DrainView| {
        let status = view.status.iter().filter(|_| warns);
        status.flat_map(warnings).for_each(|warning| output::remark(&warning));
    };
    let ended = follow::drain(&host, &request, begun).await?;
    tell_end(ended, json)
}

fn warnings(status: &DrainStatus) -> impl Iterator<Item = String> {
    status.warnings.iter().map(|warning| format!("warning: {warning}"))
}

/// The host that is named, or the one that is asked.
async fn named(fleet: &Fleet, name: Option<&str>) -> Result<Host, Problem> {
    match name {
        Some(name) => fleet.host(name).await,
        None => Ok(fleet.entry()),
    }
}

async fn plan(host: &Host, request: &DrainRequest) -> Result<DrainPlanView, Problem> {
    host.client().post_within(&host.path("/v1/drain/plan"), request, PLAN_DEADLINE).await
}

async fn dry_run(host: &Host, request: &DrainRequest, json: bool) -> Result<Exit, Problem> {
    let view = plan(host, request).await?;
    if json {
        output::json(&view)?;
    } else {
        output::print(&describe_plan(&view.plan))?;
        view.findings.iter().for_each(tell_finding);
    }
    Ok(if view.findings.is_empty() { Exit::Done } else { Exit::Refused })
}

/// Shows the plan and asks. The agent plans again when it begins: until then things may change.
async fn agreed(host: &Host, request: &DrainRequest) -> Result<bool, Problem> {
    let view = plan(host, request).await?;
    output::remark(describe_plan(&view.plan).trim_end());
    if !view.findings.is_empty() {
        view.findings.iter().for_each(tell_finding);
        return Err(Problem::refused("the plan is not carried out, because its check found this"));
    }
    ask::confirmed(&format!("Drain {}?", view.plan.host))
}

fn describe_plan(plan: &DrainPlan) -> String {
    let mut text = String::new();
    if !plan.moves.is_empty() {
        let rows = plan.moves.iter().map(|one| {
            vec![
                one.vm.clone(),
                format::bytes(one.memory_bytes as f64),
                one.target.clone(),
                to_send(one),
                format::estimate(one.predicted_transfer_ms),
            ]
        });
        text = output::table_text(&["vm", "memory", "to", "to send", "alone in"], rows.collect());
    }
    let moves = plan.moves.len();
    let whole = match moves {
        0 => format!("no VM would leave {}", plan.host),
        _ => format!(
            "{} would leave {} in {}, {} at a time at first",
            format::vms(moves),
            plan.host,
            format::estimate_up_to(plan.predicted_ms, plan.predicted_most_ms),
            usize::from(plan.transfers).min(moves)
        ),
    };
    let warnings = plan_warnings(plan).map(|warning| format!("warning: {warning}"));
    for line in disks(plan).chain(stays(&plan.stays)).chain(warnings).chain([whole]) {
        writeln!(text, "{line}").expect("a String takes all");
    }
    text
}

fn to_send(one: &Move) -> String {
    let memory =
        format::bytes(one.predicted_bytes as f64) + if one.is_compressed { ", compressed" } else { "" };
    if one.disks.is_empty() {
        return memory;
    }
    format!("{memory} and {} of disks", format::bytes(one.disk_bytes() as f64))
}

/// A line for each disk that is copied.
fn disks(plan: &DrainPlan) -> impl Iterator<Item = String> {
    let of_moves = plan.moves.iter().flat_map(|one| one.disks.iter().map(move |disk| (one, &disk.copy)));
    of_moves.map(|(one, copy)| {
        let flattened = if copy.is_flattened { "; with its backing images, as one image" } else { "" };
        format!(
            "{} takes {} {} along, {} of {}: {} does not see it{flattened}",
            one.vm,
            copy.disk,
            copy.to,
            format::bytes(copy.allocated_bytes as f64),
            format::bytes(copy.size_bytes as f64),
            one.target
        )
    })
}

fn stays(stays: &[Stay]) -> impl Iterator<Item = String> {
    stays.iter().map(|stay| format!("{} stays: {}", stay.vm, stay.why))
}

async fn status(fleet: &Fleet, name: Option<&str>, json: bool) -> Result<Exit, Problem> {
    let host = named(fleet, name).await?;
    let view: DrainView = host.client().get(&host.path("/v1/drain")).await?;
    if json {
        output::json(&view)?;
    } else {
        output::print(&describe(&view))?;
    }
    Ok(Exit::Done)
}

async fn cancel(fleet: &Fleet, name: Option<&str>, json: bool) -> Result<Exit, Problem> {
    let host = named(fleet, name).await?;
    let view: DrainView = host.client().post(&host.path("/v1/drain/cancel"), &()).await?;
    if json {
        output::json(&view)?;
    } else {
        let name = &view.host;
        output::remark(&format!("cancelling; `drainpipe drain status {name}` shows how it ends"));
    }
    Ok(Exit::Done)
}

pub(crate) async fn resume(
    connection: &ConnectionArguments,
    arguments: &ResumeArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let host = connection.fleet()?.host(&arguments.host).await?;
    let request = ResumeRequest {
        failback: arguments.failback,
        throttle_max_percent: arguments.throttle,
        encrypt: arguments.encrypt,
    };
    if arguments.failback {
        let ended = follow::failback(&host, &request).await?;
        return tell_end(ended, json);
    }
    let view: DrainView = host.client().post(&host.path("/v1/resume"), &request).await?;
    if json {
        output::json(&view)?;
    } else {
        output::remark(&format!("VMs may move to {} and start on it again", view.host));
    }
    Ok(Exit::Done)
}

fn tell_end(ended: Followed<DrainView>, json: bool) -> Result<Exit, Problem> {
    let view = match ended {
        Followed::Over(view) => view,
        Followed::LostSight(problem) => {
            output::complain(&problem);
            return Ok(Exit::InDoubt);
        }
    };
    if json {
        output::json(&view)?;
    } else {
        output::print(&describe(&view))?;
    }
    Ok(view.status.as_ref().map_or(Exit::Done, Exit::of_drain))
}

fn describe(view: &DrainView) -> String {
    let DrainView { host, cordoned, status, .. } = view;
    let mut text = String::new();
    if let Some(status) = status {
        if !status.moves.is_empty() {
            let way = if view.kind == Some(DrainKind::Failback) { "from" } else { "to" };
            let head = ["vm", way, "state", "sent", "took", "predicted"];
            text = output::table_text(&head, status.moves.iter().map(row).collect());
        }
        let is_under_way = matches!(status.state, DrainState::Moving | DrainState::Cancelling);
        let warnings = warnings(status).filter(|_| is_under_way);
        let lines = errors(&status.moves).into_iter().chain(stays(&status.stays)).chain(warnings);
        for line in lines.chain(waits(status)).chain([describe_whole(view, status)]) {
            writeln!(text, "{line}").expect("a String takes all");
        }
    }
    let cordon = if *cordoned {
        format!("{host} is cordoned: `drainpipe resume {host}` lets VMs move to it again")
    } else {
        format!("{host} takes VMs")
    };
    writeln!(text, "{cordon}").expect("a String takes all");
    text
}

fn waits(status: &DrainStatus) -> Option<String> {
    let obstacle = status.obstacle.as_ref()?;
    Some(format!("it waits, and continues by itself once this is fixed: {obstacle}"))
}

/// What went wrong or is waited for, once for all VMs with which it is the same.
fn errors(moves: &[MoveStatus]) -> Vec<String> {
    let mut errors: Vec<(String, Vec<&str>)> = Vec::new();
    for one in moves {
        let error = one.error.as_ref().map(ToString::to_string);
        let Some(error) = one.waits.clone().or(error) else { continue };
        match errors.iter_mut().find(|(known, _)| *known == error) {
            Some((_, vms)) => vms.push(&one.vm),
            None => errors.push((error, vec![&one.vm])),
        }
    }
    errors.into_iter().map(|(error, vms)| format!("{}: {error}", vms.join(", "))).collect()
}

fn row(one: &MoveStatus) -> Vec<String> {
    vec![
        one.vm.clone(),
        one.target.clone(),
        format!("{}{}", follow::state_word(one), follow::describe_packing(one.compression)),
        format::bytes(one.arrived_bytes() as f64),
        one.transfer_ms.map_or(String::new(), format::duration),
        format::estimate(one.predicted_ms),
    ]
}

fn describe_whole(view: &DrainView, status: &DrainStatus) -> String {
    let host = &view.host;
    let gone = describe_moved(view, status);
    let time = format::duration(status.elapsed_ms);
    match status.state {
        DrainState::Moving => format!("under way for {time}: {gone}; {}", follow::describe_pace(status)),
        DrainState::Cancelling => format!("being cancelled: {gone}"),
        DrainState::Drained => {
            let predicted = format::estimate_up_to(status.predicted_ms, status.predicted_most_ms);
            format!("done in {time}, predicted {predicted}: {gone}")
        }
        DrainState::Incomplete => format!("over after {time}: {gone}"),
        DrainState::Cancelled => format!("cancelled after {time}: {gone}"),
        DrainState::Interrupted => {
            format!("{host}'s agent was stopped in the middle: {gone}; {} continues", again(view))
        }
    }
}

/// The command that carries on: with all that was asked for, where that is known.
fn again(view: &DrainView) -> String {
    let command = match view.kind {
        Some(DrainKind::Failback) => format!("drainpipe resume {} --failback", view.host),
        _ => format!("drainpipe drain {}", view.host),
    };
    let Some(request) = &view.request else {
        let swap = view.swap_with.as_ref().map_or(String::new(), |host| format!(" --swap {host}"));
        return format!("`{command}{swap}`, with the other options of the first time if there were any,");
    };
    // What came by post-copy, or with its disks, goes back so, without being asked.
    let is_drain = view.kind != Some(DrainKind::Failback);
    let request = DrainRequest {
        post_copy: request.post_copy && is_drain,
        copy_storage: request.copy_storage && is_drain,
        disks_first: request.disks_first && is_drain,
        ..request.clone()
    };
    format!("`{command}{}`", options(&request))
}

fn options(request: &DrainRequest) -> String {
    let DrainRequest {
        to,
        swap_with,
        deadline_s,
        option,
        transfers,
        throttle_max_percent,
        encrypt,
        post_copy,
        copy_storage,
        disks_first,
    } = request;
    let option = Some(option).filter(|option| **option != RequestedOption::default());
    let given = [
        (!to.is_empty()).then(|| format!(" --to {}", to.join(","))),
        swap_with.as_ref().map(|host| format!(" --swap {host}")),
        deadline_s.map(|seconds| format!(" --deadline {seconds}")),
        option.map(|option| format!(" --option {option}")),
        transfers.map(|count| format!(" --transfers {count}")),
        throttle_max_percent.map(|percent| format!(" --throttle {percent}")),
        encrypt.then(|| " --encrypt".to_owned()),
        post_copy.then(|| " --post-copy".to_owned()),
        copy_storage.then(|| " --copy-storage".to_owned()),
        disks_first.then(|| " --disks-first".to_owned()),
    ];
    given.into_iter().flatten().collect()
}

fn describe_moved(view: &DrainView, status: &DrainStatus) -> String {
    let moved = status.moved();
    let way = match view.kind {
        Some(DrainKind::Failback) => "back on",
        _ => "moved away from",
    };
    let stay = match status.stays.len() {
        0 => String::new(),
        1 => ", 1 stays".into(),
        count => format!(", {count} stay"),
    };
    let left = match status.left() {
        0 => String::new(),
        1 => ", 1 was moved by somebody else".into(),
        count => format!(", {count} were moved by somebody else"),
    };
    format!("{moved} of {} {way} {}{left}{stay}", format::vms(follow::own_moves(status)), view.host)
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::drain::disks::DrainedDisk;
    use drainpipe_engine::drain::status::MoveState;
    use drainpipe_engine::storage::{CopyReason, DiskCopy, DiskImage, DiskName};

    use super::*;

    fn a_move(state: MoveState) -> MoveStatus {
        MoveStatus {
            vm: "web1".into(),
            target: "b".into(),
            state,
            migration: None,
            attempts: 1,
            error: (state == MoveState::Failed).then(|| Problem::failed("b is short of memory")),
            waits: None,
            memory_bytes: 1 << 30,
            sent_bytes: 1 << 29,
            predicted_bytes: 0,
            predicted_ms: 9_000.0,
            transfer_ms: (state == MoveState::Moved).then_some(8_600.0),
            compression: None,
            disks: None,
        }
    }

    fn a_disk() -> DrainedDisk {
        let copy = DiskCopy {
            disk: DiskName::at(0).expect("the first has a name"),
            from: "/srv/web1.img".into(),
            to: "/srv/web1.img".into(),
            image: DiskImage::Raw,
            size_bytes: 8 << 30,
            allocated_bytes: 2 << 30,
            why: CopyReason::NotSeen,
            is_flattened: false,
            from_device: None,
        };
        DrainedDisk { copy, from_device: 1, to_device: 2 }
    }

    fn a_view(state: DrainState, moves: Vec<MoveStatus>) -> DrainView {
        let stays = vec![Stay { vm: "db1".into(), why: "licence bound to this host".to_owned().into() }];
        let status = DrainStatus {
            state,
            moves,
            stays,
            transfers: 2,
            rate_mbps: 1_900.0,
            links: vec![],
            elapsed_ms: 10_000.0,
            predicted_ms: 9_500.0,
            predicted_most_ms: None,
            eta_ms: (state == DrainState::Moving).then_some(5_000.0),
            obstacle: (state == DrainState::Moving).then(|| Problem::failed("the disk is full")),
            warnings: vec!["no room for the failure of b".into()],
        };
        DrainView {
            host: "a".into(),
            cordoned: true,
            swap_with: None,
            kind: Some(DrainKind::Drain),
            id: Some("1".into()),
            started_at: None,
            ended_at: None,
            request: None,
            status: Some(status),
        }
    }

    #[test]
    fn a_plan_says_where_each_vm_goes_which_stay_and_what_to_know() {
        let plan = DrainPlan {
            host: "a".into(),
            moves: vec![Move {
                vm: "web1".into(),
                target: "b".into(),
                memory_bytes: 1 << 30,
                predicted_bytes: 1 << 29,
                is_compressed: false,
                post_copy: false,
                predicted_steps_ms: 150.0,
                predicted_transfer_ms: 4_300.0,
                predicted_shared_ms: 4_300.0,
                warning: Some("changes its memory fast".into()),
                disks: vec![a_disk()],
            }],
            stays: vec![Stay { vm: "db1".into(), why: "licence".to_owned().into() }],
            await_room: vec![],
            room_is_coming: false,
            transfers: 1,
            transfers_found: false,
            links_mbps: None,
            predicted_ms: 4_800.0,
            predicted_most_ms: Some(9_600.0),
            warnings: vec!["no room for the failure of b".into()],
        };
        let text = describe_plan(&plan);
        for part in [
            "web1  1.00 GiB  b   512 MiB and 2.00 GiB of disks  4.3 s",
            "web1 takes vda /srv/web1.img along, 2.00 GiB of 8.00 GiB: b does not see it",
            "db1 stays: licence",
            "warning: web1: changes its memory fast",
            "warning: no room for the failure of b",
            "1 VM would leave a in 4.8 s to 9.6 s, 1 at a time at first",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let empty = DrainPlan { moves: vec![], stays: vec![], warnings: vec![], ..plan };
        assert_eq!(describe_plan(&empty), "no VM would leave a\n");
    }

    #[test]
    fn a_drain_is_told_while_it_is_under_way_and_when_it_is_over() {
        let text = describe(&a_view(DrainState::Moving, vec![a_move(MoveState::Transferring)]));
        for part in [
            "on the links",
            "continues by itself once this is fixed: the disk is full",
            "warning: no room for the failure of b",
            "under way for 10.0 s: 0 of 1 VM moved away from a, 1 stays; 512 MiB of about 512 MiB, 1.90 Gb/s, 1 at a time, 5.0 s left",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let failed = || MoveStatus { vm: "web2".into(), ..a_move(MoveState::Failed) };
        let text = describe(&a_view(DrainState::Incomplete, vec![a_move(MoveState::Failed), failed()]));
        for part in
            ["web1, web2: b is short of memory", "db1 stays: licence", "a is cordoned: `drainpipe resume a`"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("warning"), "{text}");
    }

    #[test]
    fn what_was_interrupted_is_carried_on_with_what_was_asked_for() {
        let interrupted = || a_view(DrainState::Interrupted, vec![]);
        let hinted = |view: DrainView, words: &str| {
            let text = describe(&view);
            assert!(text.contains(words), "{words} in\n{text}");
        };
        let swap_with = Some("b".to_owned());
        let request = DrainRequest { swap_with: swap_with.clone(), ..DrainRequest::default() };
        hinted(
            DrainView { request: Some(request), ..interrupted() },
            "; `drainpipe drain a --swap b` continues",
        );
        let request = DrainRequest {
            to: vec!["b".into(), "c".into()],
            option: RequestedOption::Multichannel,
            throttle_max_percent: Some(0),
            encrypt: true,
            post_copy: true,
            copy_storage: true,
            disks_first: true,
            ..DrainRequest::default()
        };
        hinted(
            DrainView { request: Some(request), ..interrupted() },
            "`drainpipe drain a --to b,c --option multichannel --throttle 0 --encrypt --post-copy --copy-storage --disks-first` continues",
        );
        let older = DrainView { swap_with, ..interrupted() };
        hinted(older, "`drainpipe drain a --swap b`, with the other options of the first time");
        let back = DrainView {
            kind: Some(DrainKind::Failback),
            request: Some(DrainRequest { throttle_max_percent: Some(50), ..DrainRequest::default() }),
            ..interrupted()
        };
        hinted(back, "`drainpipe resume a --failback --throttle 50` continues");
    }

    #[test]
    fn the_exit_code_says_what_became_of_it() {
        let exit = |state, of_move| {
            Exit::of_drain(&a_view(state, vec![a_move(MoveState::Moved), a_move(of_move)]).status.unwrap())
                .code()
        };
        assert_eq!(exit(DrainState::Drained, MoveState::Moved), 0);
        assert_eq!(exit(DrainState::Incomplete, MoveState::Failed), 1);
        assert_eq!(exit(DrainState::Interrupted, MoveState::Waiting), 1);
        assert_eq!(exit(DrainState::Incomplete, MoveState::InDoubt), 4);
        assert_eq!(exit(DrainState::Cancelled, MoveState::Waiting), 5);
    }
}
