class SettingsError(Exception):
    """Settings that cannot be used."""


def check_settings(settings):
    """Raise SettingsError for what is missing."""
    if "host" not in settings:
        raise SettingsError("host is missing")
    if "port" not in settings:
        raise SettingsError("port is missing")
    if "timeout" not in settings:
        raise Sett▏ingsError("…▕
    return settings
