// Keeps an open page as it would be if it were loaded again: fragments that have changed come by one stream of server-sent events.
"use strict";

(() => {
  const MINUTE = 60, HOUR = 3600;
  const UNITS = [[24 * HOUR, "d"], [HOUR, "h"], [MINUTE, "min"], [1, "s"]];

  // As `readable_duration` of the service words it, roughly.
  const age = (seconds) => {
    if (seconds < 2) return "now";
    const [scale, unit] = UNITS.find((each) => seconds >= 2 * each[0]);
    return `${Math.floor(seconds / scale)} ${unit} ago`;
  };

  const remaining = (seconds) => {
    if (seconds < 1) return "now";
    if (seconds < MINUTE) return `in ${Math.floor(seconds)} s`;
    if (seconds < HOUR) return `in ${Math.floor(seconds / MINUTE)} min ${Math.floor(seconds % MINUTE)} s`;
    return `in ${Math.floor(seconds / HOUR)} h ${Math.floor((seconds % HOUR) / MINUTE)} min`;
  };

  // Moments are by the service's clock, from which this machine's may differ: by how much, the page's own answer tells.
  const AMISS = 2000;
  const answered = performance.timeOrigin + performance.getEntriesByType("navigation")[0].responseStart;
  const apart = answered - Number(document.body.dataset.now);
  const skew = Math.abs(apart) > AMISS ? apart : 0;

  // A moment that lies ahead of the service's clock was told by another one that is wrong, and is shown as it is.
  const showAges = (where) => {
    for (const time of where.querySelectorAll("time[data-age], time[data-until]")) {
      if (!time.title) time.title = time.textContent;
      const seconds = (Date.now() - skew - new Date(time.dateTime).getTime()) / 1000;
      const until = "until" in time.dataset;
      const text = until ? remaining(-seconds) : seconds < -MINUTE ? time.title : age(seconds);
      if (time.textContent !== text) time.textContent = text;
    }
  };

  // What somebody is typing in, has opened or has focused stays: elements with the same id stand for each other.
  const replace = (element, html) => {
    const template = document.createElement("template");
    template.innerHTML = html;
    const focused = element.contains(document.activeElement) ? document.activeElement : null;
    const selection = focused && "selectionStart" in focused ? [focused.selectionStart, focused.selectionEnd] : null;
    for (const old of element.querySelectorAll("details[open][id]")) {
      const now = template.content.getElementById(old.id);
      if (now) now.open = true;
    }
    for (const old of element.querySelectorAll("input[id], select[id]")) {
      const now = template.content.getElementById(old.id);
      const touched = old === focused || (old.matches("input") ? old.value !== old.defaultValue : old.dataset.touched);
      if (now && touched) {
        now.value = old.value;
        if (old.dataset.touched) now.dataset.touched = "1";
      }
    }
    const path = focused && !focused.id ? selectorOf(focused, element) : "";
    element.replaceChildren(template.content);
    showAges(element);
    const again = focused && (focused.id ? document.getElementById(focused.id) : path && element.querySelector(path));
    if (again) {
      again.focus({ preventScroll: true });
      if (selection && selection[0] !== null) again.setSelectionRange(...selection);
    }
  };

  const selectorOf = (element, root) => {
    if (element.matches("a[href]")) return `a[href="${CSS.escape(element.getAttribute("href"))}"]`;
    const form = element.closest("form[action]");
    if (form && root.contains(form)) return `form[action="${CSS.escape(form.getAttribute("action"))}"] ${element.localName}`;
    const details = element.closest("details[id]");
    return details ? `#${CSS.escape(details.id)} > summary` : "";
  };

  document.addEventListener("change", (event) => {
    if (event.target.matches("select")) event.target.dataset.touched = "1";
  });

  const live = document.getElementById("live");
  const liveText = document.getElementById("live-text");
  const lost = document.getElementById("lost");
  const say = (on, text) => {
    live.classList.toggle("on", on);
    live.classList.toggle("off", !on);
    if (liveText.textContent !== text) liveText.textContent = text;
  };

  let source = null, since = 0, news = "";

  const announce = () => {
    const element = document.querySelector("[data-say]");
    const text = element ? element.textContent : "";
    if (news && text && text !== news) {
      const region = document.getElementById("news") || document.body.appendChild(Object.assign(document.createElement("p"), { id: "news", className: "hidden" }));
      region.setAttribute("role", "status");
      region.textContent = text;
    }
    news = text;
  };

  const take = (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const element = document.getElementById(`f-${name}`);
      if (!element) continue;
      if (name === "trouble") {
        element.className = html ? "banner" : "";
        element.textContent = html;
      } else {
        replace(element, html);
      }
    }
    announce();
  };

  const follow = () => {
    source = new EventSource(document.body.dataset.events);
    source.addEventListener("open", () => {
      since = 0;
      lost.hidden = true;
      say(true, "live");
    });
    source.addEventListener("fragments", take);
    source.addEventListener("error", () => {
      since = since || Date.now();
      say(false, "not live");
      const ended = source.readyState === EventSource.CLOSED;
      lost.textContent = ended
        ? "The service no longer updates this page. Reload it; you may have to sign in again."
        : `The service cannot be reached since ${new Date(since).toLocaleTimeString()}. This page shows an earlier state.`;
      lost.hidden = false;
      if (ended) setTimeout(() => document.hidden || follow(), 5000);
    });
  };

  showAges(document);
  setInterval(() => document.hidden || showAges(document), 1000);
  if (document.body.dataset.events) {
    announce();
    follow();
    // browsers have few connections for each service: a page that nobody sees needs none
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) {
        source.close();
        say(false, "paused");
      } else {
        follow();
      }
    });
  }
})();
