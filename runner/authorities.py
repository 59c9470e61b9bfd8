# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Whom TLS trusts in the box: the authorities that travel in the archive, and those that SSL_CERT_FILE and SSL_CERT_DIR name.

A minimal image has none of its own; the variables are the task's. It refuses to be imported where no TLS is spoken: that would
cost the start of every session.
"""

from __future__ import annotations

import ssl

import certifi


def tls() -> ssl.SSLContext:
    """Make a client's context."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.set_default_verify_paths()  # also SSL_CERT_FILE and SSL_CERT_DIR, for an authority of one's own
    return context
