"""Figures as they are shown: three digits that count, and units of a thousand, as disks and networks are sold."""


def figure(value: float) -> str:
    """1,234,567 as 1,230,000; 12.345 as 12.3."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 or rounded == int(rounded) else f"{rounded:g}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def counted_days(days: float) -> str:
    return "1 day" if days == 1 else f"{figure(days)} days"


def bytes_of(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if float(f"{count:.3g}") < 1000:
            return f"{figure(count)} {unit}"
        count /= 1000
    return f"{figure(count)} PB"


def bits_of(count: float) -> str:
    """Bytes a second as networks are measured."""
    return f"{figure(count * 8 / 1e9)} Gbit/s"
