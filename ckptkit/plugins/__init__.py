"""ckptkit under the frameworks that people run: one module for each, which nothing else imports."""

from __future__ import annotations
