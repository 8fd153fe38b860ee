//! One agent per host: API, journal, executor of the engine's actions.
