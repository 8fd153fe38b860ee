//! Certificates of hosts and operators, and the TLS made of them.
