const storageKey = "editor-settings";

export interface Settings {
  theme: string;
  fontSize: number;
}

export function saveSettings(settings: Settings): void {
  localStorage.setItem(storageKey, JSON.stringify(settings));
}

export function settingsSize(): number {
  const text = localStorage.getItem(storageKey);
  return text === null ? 0 : text.length;
}

export function loadSettings(defaults: Settings): Settings {
  const text = localStorage.getItem(stor▏ageKey▕);
  return text === null ? defaults : { ...defaults, ...JSON.parse(text) };
}
