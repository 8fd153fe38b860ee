//! Tables and charts of migration results.
