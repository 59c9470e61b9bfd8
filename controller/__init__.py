# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The host side: pushes, opens, invokes, collects, closes."""
