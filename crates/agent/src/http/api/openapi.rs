//! The OpenAPI document: what the handlers say about themselves, and what holds for all of them.
//!
//! `docs/openapi.json` is a copy for readers without an agent; a test keeps it true.

use std::sync::LazyLock;

use axum::Json;
use drainpipe_engine::problem::Problem;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ContentBuilder, Object, ObjectBuilder, OpenApi, Ref, RefOr, Required, Response, ResponseBuilder, Schema,
    Type,
};
use utoipa::{OpenApi as _, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::handlers::fleet::routes_to_join;
use super::{Routes, routes_for_agents, routes_for_all, tags};

/// What an agent answers whose journal is not believed, too.
const JOURNAL: &str = "/v1/journal";

const MUTUAL_TLS: &str = "mutual_tls";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Drainpipe",
        version = env!("CARGO_PKG_VERSION"),
        license(name = "Apache-2.0 OR MIT", identifier = "Apache-2.0 OR MIT"),
        description = "\
One agent runs on every host, and each speaks this API: by mutual TLS to operators and to the other \
agents, and over a Unix socket to root on its own host.

**Begin** with `GET /v1/hosts` and `GET /v1/vms?scope=all`. **Move** a VM with `POST /v1/migrations` at \
the host that it runs on, then read `GET /v1/migrations/{id}` until there is a `result`. \
`POST /v1/migrations/plan` says how it would be done and does nothing.

**Empty** a host with `POST /v1/drain`, which moves all its VMs and keeps others away, then read \
`GET /v1/drain` until there is an `ended_at`. `POST /v1/resume` lets VMs come again, and brings back those that \
left.

**Any agent will do:** `?host=NAME` passes a request on to the agent of that host. It goes there under the \
passing host's certificate, so it may do what a host may: look, and move VMs to itself.

**Every failure** is a `Problem`: `message` says what is wrong, where, and what to do; `kind` is for \
programs. An agent whose journal is not believed refuses everything but the paths under `/v1/journal`, with 422.

The paths tagged `between-agents` are the steps of a migration as its source leads them. Only hosts may \
use them.",
    ),
    servers((
        url = "https://{host}:{port}",
        description = "An agent.",
        variables(
            ("host" = (default = "node-1", description = "Name of the host, as in its certificate.")),
            ("port" = (default = "7420", description = "As in `listen` of its agent.toml.")),
        ),
    )),
    tags(
        (name = tags::HOSTS, description = "Hosts, and this document."),
        (name = tags::VMS, description = "VMs that Drainpipe runs itself."),
        (name = tags::MIGRATIONS, description = "Migrations from a host: under way and past."),
        (name = tags::DRAIN, description = "Emptying a host, and bringing back what left it."),
        (name = tags::FLEET, description = "Hosts that come to the fleet and leave it."),
        (name = tags::BETWEEN_AGENTS, description = "Steps of a migration and of a check, from the source's agent to the target's."),
    ),
    components(schemas(Problem)),
)]
struct Base;

pub(super) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(openapi_document))
}

/// This document
#[utoipa::path(get, path = "/v1/openapi.json", tag = tags::HOSTS, responses(
    (status = 200, description = "OpenAPI.", body = Object),
))]
async fn openapi_document() -> Json<&'static OpenApi> {
    Json(document())
}

/// The document.
pub(super) fn document() -> &'static OpenApi {
    static DOCUMENT: LazyLock<OpenApi> = LazyLock::new(make);
    &DOCUMENT
}

fn make() -> OpenApi {
    let mut document = Base::openapi();
    document.merge(routes_for_all().into_openapi());
    document.merge(routes_for_agents().into_openapi());
    document.merge(routes_to_join().into_openapi());
    add_security(&mut document);
    join_flattened(&mut document);
    for (path, item) in &mut document.paths.paths {
        for operation in [&mut item.get, &mut item.post, &mut item.delete].into_iter().flatten() {
            add_what_holds_for_all(operation);
            if !path.starts_with(JOURNAL) {
                add_problem(operation, "422", "The journal of the host is not believed.");
            }
        }
    }
    document
}

fn add_security(document: &mut OpenApi) {
    let scheme = SecurityScheme::MutualTls {
        description: Some(
            "A certificate of the fleet's authority, of a host or an operator: `drainpipe pki` makes them. Root \
             on the host needs none over the Unix socket, /run/drainpipe/agent.sock."
                .into(),
        ),
        deprecated: None,
        extensions: None,
    };
    document.components.get_or_insert_default().add_security_scheme(MUTUAL_TLS, scheme);
    let certificate = SecurityRequirement::new(MUTUAL_TLS, Vec::<String>::new());
    document.security = Some(vec![certificate]);
}

/// Parts of a value that are no objects of their own in JSON are none here.
fn join_flattened(document: &mut OpenApi) {
    for schema in document.components.get_or_insert_default().schemas.values_mut() {
        let RefOr::T(Schema::AllOf(whole)) = schema else { continue };
        let description = whole.description.clone();
        let Some(parts) = parts_of(schema) else { continue };
        let mut joined = ObjectBuilder::new().description(description);
        for Object { properties, required, .. } in parts {
            joined =
                properties.into_iter().fold(joined, |joined, (name, schema)| joined.property(name, schema));
            joined = required.into_iter().fold(joined, ObjectBuilder::required);
        }
        *schema = joined.build().into();
    }
}

/// The objects that it is made of; none where one of its parts is known by its name.
fn parts_of(schema: &RefOr<Schema>) -> Option<Vec<Object>> {
    match schema {
        RefOr::T(Schema::Object(object)) => Some(vec![object.clone()]),
        RefOr::T(Schema::AllOf(whole)) => {
            let parts: Option<Vec<_>> = whole.items.iter().map(parts_of).collect();
            Some(parts?.concat())
        }
        _ => None,
    }
}

fn add_what_holds_for_all(operation: &mut Operation) {
    add_problem(operation, "400", "The request makes no sense; the message says where.");
    add_problem(operation, "403", "This caller may not.");
    add_problem(operation, "500", "It was tried and failed.");
    if operation.request_body.is_some() {
        add_problem(operation, "408", "The body did not arrive in time.");
        add_problem(operation, "413", "The body is longer than 1 MiB.");
        add_problem(operation, "415", "The body is not announced as `application/json`.");
    }
    let is_between_agents = operation.tags.iter().flatten().any(|tag| tag == tags::BETWEEN_AGENTS);
    // A request without a certificate is not passed on.
    if is_between_agents || operation.security.is_some() {
        return;
    }
    // Both the same at every path, and only of interest with `host`.
    operation.security = Some(vec![
        SecurityRequirement::new(MUTUAL_TLS, Vec::<String>::new()),
        SecurityRequirement::default(),
    ]);
    operation.parameters.get_or_insert_default().push(host_parameter().into());
    add_problem(operation, "404", "No host of that name.");
    add_problem(operation, "502", "That host does not answer.");
}

fn host_parameter() -> Parameter {
    ParameterBuilder::new()
        .name("host")
        .parameter_in(ParameterIn::Query)
        .required(Required::False)
        .description(Some("Pass the request on to the agent of this host."))
        .schema(Some(ObjectBuilder::new().schema_type(Type::String).max_length(Some(253)).build()))
        .build()
}

/// Adds a response, unless the handler has a better description of it.
fn add_problem(operation: &mut Operation, status: &str, description: &str) {
    operation
        .responses
        .responses
        .entry(status.into())
        .or_insert_with(|| RefOr::T(problem_response(description)));
}

fn problem_response(description: &str) -> Response {
    let schema = Ref::from_schema_name(Problem::name());
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new().description(description).content("application/json", content).build()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Set to have the checked-in copy written again.
    const UPDATE: &str = "DRAINPIPE_UPDATE";

    #[test]
    fn the_checked_in_openapi_document_is_the_one_that_is_served() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let served = document().to_pretty_json().unwrap() + "\n";
        if std::env::var_os(UPDATE).is_some() {
            std::fs::write(&path, &served).unwrap();
        }
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            checked_in == served,
            "docs/openapi.json is out of date: run `{UPDATE}=1 cargo test -p drainpipe-agent openapi`"
        );
    }

    #[test]
    fn every_operation_is_summed_up_tagged_and_says_how_it_fails() {
        let known =
            [tags::HOSTS, tags::VMS, tags::MIGRATIONS, tags::DRAIN, tags::FLEET, tags::BETWEEN_AGENTS];
        for (path, item) in &document().paths.paths {
            for operation in [&item.get, &item.post, &item.delete].into_iter().flatten() {
                assert!(operation.summary.is_some(), "{path}");
                let of_operation = operation.tags.as_deref().unwrap_or_default();
                assert!(of_operation.len() == 1 && known.contains(&of_operation[0].as_str()), "{path}");
                let answers = &operation.responses.responses;
                for status in ["200", "400", "403", "500"] {
                    assert!(answers.contains_key(status), "{path} {status}");
                }
                assert_eq!(answers.contains_key("422"), !path.starts_with("/v1/journal"), "{path}");
            }
        }
    }
}
