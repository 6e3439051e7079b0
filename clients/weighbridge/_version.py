"""Version of this distribution."""

VERSION = "0.1.0"
