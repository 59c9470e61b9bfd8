# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters that give somebody's container, this machine, or a NeMo Gym sandbox the shape of controller/sandbox.py."""
