"""Recurring functions: nightly by cron, and every few minutes."""
