//! The API as callers meet it: a real agent, its Unix socket, and TLS with each kind of certificate.

mod authorization;
mod drains;
mod harness;
mod hostile;
mod joining;
mod stolen;
mod versions;
