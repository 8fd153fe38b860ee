//! Links, addresses, routes and kernel settings of a host.
