# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The sandbox side before the agent exists: preconditions and installation."""
