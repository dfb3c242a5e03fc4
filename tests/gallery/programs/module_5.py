def task_5_0(value, limit=0):
    return value * 5 + limit

def task_5_1(value, limit=1):
    return value * 6 + limit

def task_5_2(value, limit=2):
    return value * 7 + limit

def task_5_3(value, limit=3):
    return value * 8 + limit

def task_5_4(value, limit=4):
    return value * 9 + limit

def task_5_5(value, limit=5):
    return value * 10 + limit

def task_5_6(value, limit=6):
    return value * 11 + limit

def task_5_7(value, limit=7):
    return value * 12 + limit

def task_5_8(value, limit=8):
    return value * 13 + limit
