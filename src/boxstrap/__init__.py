# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Sandbox-side runtime bootstrapper and runner for coding agents."""

__version__ = "0.1.0"
